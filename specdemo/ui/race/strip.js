// The passes of a lane to scale: each is as wide as it took, and so is its draft before it. Above it are its tokens, those
// of all readers where several share a pass.

const PASS = 9; // px that a pass of the first lane takes
const WIDEST = 8000; // px of a strip; in a longer race every pass takes less
const [BLOCK, DRAFT, TOKEN] = [8, 3, 4]; // px
const KNOWN = 4; // passes from which the scale is taken
export const PASSES = ["The passes, to scale", "Each block is a pass of the target, and its width is its time. The line before it is the draft. Above it are the tokens of the pass; discarded guesses are pale. All lanes have the same scale."];
const WHY = [PASSES[0], `${PASSES[1]} Press a block to step through its round.`];

/** Pixels for a second, the same for all lanes; null before enough is known. */
export const scaleOf = (strips, before) => {
  const { passes } = strips.find((one) => one.passes.length >= KNOWN) ?? { passes: [] };
  const widths = passes.map(({ reads, to }) => to - reads).sort((a, b) => a - b);
  const scale = before ?? PASS / widths[Math.floor(widths.length / 2)]; // not a number if nothing is known
  const longest = Math.max(0, ...strips.map((one) => one.end));
  return scale > 0 ? Math.min(scale, WIDEST / longest) : null;
};

/** The same when they are over: each is in sight as a whole, so that their lengths can be compared. */
export const wholeScale = (strips, scale) => {
  const [width, end] = [Math.min(...strips.map(({ node }) => node.clientWidth)), Math.max(...strips.map((one) => one.end))];
  return width && end ? Math.min(scale, width / end) : scale;
};

/** The colours of what is drawn inside an element. */
export const coloursOf = (element) => {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(`--sd-${name}`);
  return { a: colour("a"), r: colour("r"), b: colour("b"), "-": colour("x"), pass: colour("lane"), other: colour("soft") };
};

/** Draw a pass at its place in a strip of so many px. */
export const drawPass = (brush, { from, reads, to, codes }, scale, tall, colours) => {
  const base = tall - BLOCK;
  const fill = (colour, x, y, width, height) => {
    brush.fillStyle = colour;
    brush.fillRect(x, y, width, height);
  };
  const width = Math.max(1, (to - reads) * scale - 1);
  fill(colours.other, from * scale, base + (BLOCK - DRAFT) / 2, (reads - from) * scale, DRAFT);
  fill(colours.pass, reads * scale, base, width, BLOCK);
  const height = Math.min(TOKEN, base / codes.length);
  codes.forEach((code, at) => {
    brush.globalAlpha = code === "-" ? 0.35 : 1;
    fill(colours[code] ?? colours.other, reads * scale, base - (at + 1) * height, width, Math.max(height - 1, height / 2));
  });
  brush.globalAlpha = 1;
};

export class Strip {
  constructor(node) {
    Object.assign(this, { node, canvas: node.firstElementChild });
    node.sdWhy = WHY;
    const open = ({ at, lanes }) => lanes[0].node.dispatchEvent(new CustomEvent("round", { bubbles: true, detail: at }));
    node.addEventListener("click", ({ clientX }) => {
      const second = (clientX - this.canvas.getBoundingClientRect().left) / this.scale;
      const pressed = this.passes.find(({ to }) => second <= to);
      if (pressed) open(pressed);
    });
    node.addEventListener("keydown", ({ key }) => key === "Enter" && this.passes.length && open(this.passes.at(-1)));
    this.clear();
    // It may be drawn while its tab is hidden, and has no size until it is shown.
    new ResizeObserver(() => {
      if (node.clientHeight === this.height) return;
      Object.assign(this, { height: node.clientHeight, scale: null });
      this.draw(this.wanted);
    }).observe(node);
  }

  clear() {
    Object.assign(this, { passes: [], taken: new Map(), drawn: 0, scale: null, wanted: null, began: null });
    this.canvas.width = 0;
    this.canvas.style.width = "0";
  }

  /** Seconds after the first token at which the last pass ended. */
  get end() {
    return this.passes.at(-1)?.to ?? 0;
  }

  take({ tokens, at, seconds, merged }, lane) {
    if (!seconds) this.began ??= at; // the first token came with the prompt's pass
    if (!seconds || this.began === null) return;
    const [draft, all] = [(seconds.draft ?? 0) / merged, seconds.all / merged];
    const codes = [...tokens].sort((a, b) => b.emitted - a.emitted).map(({ emitted, code }) => (emitted ? code : "-"));
    const place = this.taken.get(lane) ?? 0;
    this.taken.set(lane, place + merged);
    const shared = this.passes[place]; // readers are together from their first pass until their texts end
    if (shared) {
      shared.lanes.push(lane);
      shared.codes = [...shared.codes, ...codes].sort((a, b) => (a === "-") - (b === "-"));
      this.drawn = Math.min(this.drawn, place);
      return;
    }
    for (let pass = 0; pass < merged; pass++) {
      const to = at - this.began - (merged - 1 - pass) * all;
      const own = merged > 1 ? [codes[Math.floor((pass * codes.length) / merged)]] : codes;
      this.passes.push({ from: to - all, reads: to - all + draft, to, at, codes: own, lanes: [lane] });
    }
  }

  /** Draw what is new, at the scale of all lanes. */
  draw(scale) {
    this.wanted = scale;
    if (!scale || !this.height) return;
    const { canvas, passes } = this;
    const dots = window.devicePixelRatio || 1;
    const wide = this.end * scale;
    if (scale !== this.scale || wide * dots > canvas.width) {
      const room = Math.ceil(Math.min(WIDEST, Math.max(this.node.clientWidth, 2 * wide)));
      Object.assign(canvas, { width: room * dots, height: this.height * dots });
      Object.assign(canvas.style, { width: `${room}px`, height: `${this.height}px` });
      Object.assign(this, { scale, drawn: 0, brush: canvas.getContext("2d") });
      this.brush.scale(dots, dots);
      this.colours = coloursOf(canvas);
    }
    for (; this.drawn < passes.length; this.drawn++) {
      const pass = passes[this.drawn];
      this.brush.clearRect(pass.from * scale, 0, (pass.to - pass.from) * scale, this.height); // fewer readers' tokens
      drawPass(this.brush, pass, scale, this.height, this.colours);
    }
  }

  /** So that the newest pass is in sight. */
  scroll() {
    this.node.scrollLeft = this.end * this.scale - this.node.clientWidth;
  }
}
