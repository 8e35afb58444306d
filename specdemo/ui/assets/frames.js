// Gradio's loading sign goes on asking for frames after it is gone, 60 a second for as long as the page is open (6.31):
// 4% of a core, which on a shared processor the engine pays for. It keeps the function that it finds when it is loaded,
// after this script; so it finds this one, which slows down when the page is open. What looks later finds the browser's.
const SLOW_MS = 1000;
const nextFrame = window.requestAnimationFrame;
let resting = false;
window.requestAnimationFrame = (draw) => (resting ? setTimeout(draw, SLOW_MS) : nextFrame.call(window, draw));

/** The page is open. */
export const restFrames = () => {
  resting = true;
  window.requestAnimationFrame = nextFrame;
};
