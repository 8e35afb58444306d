// At the end of a race, the proof that its texts are the same: hidden guesses let all lanes break their lines alike, the
// lanes scroll together, and each line that is the same in all of them gets a tick, see race.css.
import { still } from "./show.js";

const SWEEP_MS = 1500; // as in race.css
const PROVED = ["same", "differs"]; // the marks of texts that should be the same

export class Proof {
  constructor(race) {
    Object.assign(this, { race, shown: false, parted: [], resized: new ResizeObserver(() => this.measure()) });
    const { panes, hide } = race.parts;
    hide.addEventListener("change", () => this.hide(hide.checked));
    panes.addEventListener("scroll", ({ target }) => this.scrolled(target), { capture: true, passive: true });
  }

  /** Hide what was drafted and discarded. */
  hide(hidden) {
    this.race.parts.hide.checked = hidden;
    this.race.root.classList.toggle("sd-hiding", hidden);
  }

  /** Of the badge, see compare.py: its mark, the place of the first token that is not in all texts, and its margin. */
  show({ mark, place, margin }) {
    const { race } = this;
    if (this.shown || race.wall || !PROVED.includes(mark)) return;
    race.draw();
    const lanes = Object.values(race.lanes);
    Object.assign(this, { shown: true, hidden: race.parts.hide.checked });
    this.hide(true);
    race.root.dataset.proof = mark;
    this.parted = lanes.map(({ parts }) => parts.text.querySelectorAll(".tok:not(.x, .u, .g)")[place]).filter(Boolean);
    this.measure();
    for (const token of mark === "differs" ? this.parted : []) {
      token.classList.add("parted");
      if (margin) token.dataset.margin = margin;
      token.toggleAttribute("data-right", token.offsetLeft > token.offsetParent?.clientWidth / 2);
    }
    const [top] = mark === "differs" ? this.parted.map((token) => token.offsetTop) : [];
    for (const lane of lanes) lane.scrollTo(top ? top - lane.parts.pane.clientHeight / 2 : 0);
    for (const { parts } of lanes) this.resized.observe(parts.text);
    this.began = mark === "same" && !still() ? performance.now() : -Infinity;
    this.follow();
  }

  /** The panes go down with the sweep, until it ends or a reader scrolls. */
  follow() {
    const swept = (performance.now() - this.began) / SWEEP_MS;
    if (swept > 1 || !this.shown) return;
    for (const lane of Object.values(this.race.lanes)) {
      const { text, pane } = lane.parts;
      lane.scrollTo(swept * text.clientHeight - pane.clientHeight / 2);
    }
    requestAnimationFrame(() => this.follow());
  }

  /** As many ticks as lines of all texts are the same. */
  measure() {
    const places = this.parted.length
      ? this.parted.map((token) => [token.closest(".sd-text"), token.offsetTop])
      : Object.values(this.race.lanes).map(({ parts }) => [parts.text, parts.text.clientHeight]);
    const lines = places.map(([text, top]) => Math.floor(top / parseFloat(getComputedStyle(text).lineHeight) + 0.1));
    this.race.root.style.setProperty("--sd-ticks", `"${"✓\\a ".repeat(Math.min(...lines))}"`);
  }

  /** What a reader scrolls moves all lanes. */
  scrolled(pane) {
    const lanes = Object.values(this.race.lanes);
    const moved = lanes.find(({ parts }) => parts.pane === pane);
    if (!this.shown || !this.race.parts.hide.checked || !moved || pane.scrollTop === moved.top) return;
    moved.top = pane.scrollTop;
    this.began = -Infinity;
    for (const lane of lanes) if (lane !== moved) lane.scrollTo(pane.scrollTop);
  }

  clear() {
    if (!this.shown) return;
    this.shown = false;
    this.resized.disconnect();
    this.hide(this.hidden);
    delete this.race.root.dataset.proof;
  }
}
