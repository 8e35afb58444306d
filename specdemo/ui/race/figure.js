// One round, large: the drafter's guesses are tiles, the pass of the target is a beam that reads all of them at once. What
// is right stays in its row, the target's own token drops into it, and what is discarded falls below it.
import { make } from "../assets/page.js";
import { tiles } from "./round.js";

export class Figure {
  constructor(node) {
    this.node = node;
  }

  /** Draw a round in a phase: its draft "guess", the pass "read", what it accepts "keep", and the token that it gives
   *  besides, "replace" or "add". */
  show(round, phase) {
    const { draft, tested, last } = round;
    const right = draft.filter(({ code }) => code === "a").length;
    const place = { guess: -1, read: -1, keep: right - 1 }[phase] ?? draft.length;
    const [before, ...shown] = tiles(round, place);
    shown.forEach((tile, at) => {
      tile.textContent = tile.textContent.trim(); // the gap stands for the blank
      tile.style.setProperty("--at", at);
      tile.style.gridColumn = at < draft.length ? at + 1 : last.code === "r" ? tested : at + 1;
    });
    const beam = make("i", "sd-beam");
    this.node.replaceChildren(before, make("div", "sd-tiles", ...shown, beam));
    this.node.dataset.phase = phase;
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }
}
