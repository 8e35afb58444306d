// Records a race that is drawn on a canvas as a film.
const TYPES = [["video/mp4;codecs=avc1.42E01F", "mp4"], ["video/webm;codecs=vp9", "webm"], ["video/webm", "webm"]];
const FRAMES = 30; // a second
const [PLAYS, RESTS] = [6.5, 1.5]; // seconds: the race, and its result
const BITS = 4_000_000; // a second

/** The type and the ending of the files that this browser can record; undefined if it cannot. */
export const filmType = (canvas) => canvas.captureStream && TYPES.find(([type]) => window.MediaRecorder?.isTypeSupported(type));

/** `draw` is called with the share of the race that is to be shown, from 0 to 1. Returns the film, or null if it was
 *  `stopped` before its end. */
export const film = async (canvas, draw, type, stopped) => {
  const recorder = new MediaRecorder(canvas.captureStream(FRAMES), { mimeType: type, videoBitsPerSecond: BITS });
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve));
  draw(0);
  recorder.start();
  const began = performance.now();
  await new Promise((resolve) => {
    const frame = () => {
      const seconds = (performance.now() - began) / 1000;
      if (stopped() || seconds > PLAYS + RESTS) return resolve();
      draw(Math.min(1, seconds / PLAYS));
      setTimeout(frame, 1000 / FRAMES);
    };
    frame();
  });
  recorder.stop();
  await ended;
  return stopped() ? null : new Blob(parts, { type });
};
