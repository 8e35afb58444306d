// Stage mode: the race alone, large, for a hall. The keys are those of a clicker, and recordings play when nobody touches it.
import { fetched, page } from "../assets/page.js";
import { press } from "../assets/top.js";

const IDLE_MS = 60_000; // without a touch until recordings play
const REST_MS = 8_000; // between two of them
const LOOK_MS = 500;
const TOUCHES = ["pointerdown", "pointermove", "keydown", "wheel"];
const BUSY = ["waiting", "loading", "running", "showing"];

export class Stage {
  constructor() {
    Object.assign(this, { on: false, idle: IDLE_MS, rest: REST_MS, touched: 0, rested: 0, played: 0 });
    document.addEventListener("visibilitychange", () => this.on && this.keepAwake());
    document.addEventListener("fullscreenchange", () => this.on && this.full && !document.fullscreenElement && this.toggle(false));
  }

  toggle(on = !this.on) {
    this.on = on;
    document.body.classList.toggle("sd-on-stage", on);
    window.scrollTo(0, 0);
    clearInterval(this.timer);
    for (const name of TOUCHES) document[on ? "addEventListener" : "removeEventListener"](name, this.touch, { passive: true, capture: true });
    this.touch();
    if (on) {
      this.full = false;
      document.documentElement.requestFullscreen?.().then(() => (this.full = true), () => {}); // a browser may refuse it
      this.timer = setInterval(() => this.attract(), LOOK_MS);
      this.keepAwake();
    } else {
      if (document.fullscreenElement) document.exitFullscreen();
      this.lock?.release();
    }
    page.race?.drawNow();
    page.race?.game.focus();
  }

  /** The screen stays on, where the browser can do that. */
  async keepAwake() {
    this.lock = await navigator.wakeLock?.request("screen").catch(() => null);
  }

  // --- the keys

  get keys() {
    const run = () => this.run();
    const next = () => (page.race.game.playing ? page.race.game.test() : page.race.show.request?.guesses ? null : BUSY.includes(page.race.state) ? page.race.skip() : page.race.is("opening") ? page.race.opening.skipScene() : run());
    return { pagedown: next, pageup: run, ".": () => this.run(() => page.pick()), f: () => this.toggle(), g: () => page.race.game.begin(), escape: () => this.toggle(false) };
  }

  /** Whether it has done what a key asks for. */
  key(key) {
    const act = /^[1-9]$/.test(key) ? () => this.run(() => page.pick(key - 1)) : this.keys[key];
    act?.();
    return Boolean(act);
  }

  /** Race the prompt of the form, or the example that is picked first. */
  async run(pick) {
    if (BUSY.includes(page.race.state)) return;
    await pick?.();
    press("run");
  }

  // --- when nobody is there

  touch = () => {
    this.touched = performance.now();
  };

  /** After a minute, one recording after the other. */
  attract() {
    const { race } = page;
    const since = performance.now() - this.touched;
    if (race.is(...BUSY, "opening") || race.game.playing) this.rested = performance.now();
    else if (since > this.idle && performance.now() - this.rested > this.rest && race.attract?.length) {
      this.rested = performance.now();
      race.explain(fetched(`/recordings/${race.attract[this.played++ % race.attract.length]}`), true);
    }
  }
}
