// Shows a race at a pace. Events come in as they are measured, and go to the arena when the clock that is shown reaches
// them. A race that is still being measured is one whose end is not known yet; of a replay it is known from the start.
import { kept } from "../assets/page.js";
import { readEvent } from "./events.js";

const TICK_MS = 40;
const SLOW_SECONDS = 12; // that the slowest lane takes in slow motion
const ROUND_SECONDS = 0.9; // that a round takes when it is gone to round by round
const MAKE_UP = 0.3; // of the time that passes, see `madeUp`
export const PACE = "specdemo-pace"; // under which the chosen one is kept
export const PACES = { slow: "Slow motion", real: "Real time", rounds: "Round by round", once: "At once" };

/** The pace that was chosen here. Slow motion at first; whoever wants no motion sees everything at once. */
const chosenPace = () => {
  const chosen = kept(PACE);
  return chosen in PACES ? chosen : still() ? "once" : "slow";
};
export const still = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

const last = ({ events }) => events.at(-1);
const finished = (lane) => Boolean(last(lane).figures?.finish_reason);

export class Show {
  /** `moved` is called after every step of the clock. */
  constructor(race, moved = () => {}) {
    Object.assign(this, { race, moved, pace: chosenPace() });
    this.clear();
  }

  /** Nothing is known. */
  clear() {
    this.pause();
    Object.assign(this, { request: null, lanes: {}, end: null, time: 0, hurry: false, live: false, shared: false });
  }

  /** Begin anew. `opened` is called whenever the arena has been cleared. */
  start(request, opened = () => {}) {
    this.clear();
    Object.assign(this, { request, opened, live: true, shared: request.shared });
    this.rewind();
  }

  /** Begin with a recording, see playable.py; an `end` makes it known as a whole. */
  load({ request, lanes }, end, opened) {
    this.start({ ...request, lanes: Object.keys(lanes) }, opened);
    this.add(Object.fromEntries(Object.entries(lanes).map(([lane, { events }]) => [lane, events])), end);
  }

  rewind() {
    this.time = this.waited = 0;
    this.step = 0; // the event of the drafted lane up to which it is shown round by round
    this.done = false;
    for (const lane of Object.values(this.lanes)) lane.shown = 0;
    this.race.start(this.request);
    this.opened();
  }

  /** Events that follow those known, {lane: [event, ...]} as messages hold them; the last ones come with the `end`. */
  add(lanes, end = null) {
    for (const [name, events] of Object.entries(lanes)) {
      this.lanes[name] ??= { events: [], shown: 0 };
      for (const event of events) this.lanes[name].events.push(readEvent(event));
    }
    if (end) {
      if (this.measures) this.before = performance.now(); // from here on it can be watched
      Object.assign(this, { end, live: false });
    }
    if (this.playing) this.tick();
  }

  /** Whether the engine measures on the browser's own cores. What the browser draws would be taken from the engine: it
   *  shows nothing before the end is known. */
  get measures() {
    return this.live && this.shared;
  }

  /** How many tokens of all lanes are known. */
  get measured() {
    return Object.values(this.lanes).reduce((sum, lane) => sum + (last(lane).figures?.tokens ?? 0), 0);
  }

  /** The time up to which all lanes are known. */
  get horizon() {
    const lanes = Object.values(this.lanes);
    const open = this.end ? [] : lanes.filter((lane) => !finished(lane));
    if (!this.end && lanes.length < Object.keys(this.race.lanes).length) return 0;
    if (open.length) return Math.min(...open.map((lane) => last(lane).at));
    return Math.max(0, ...lanes.map((lane) => last(lane).at));
  }

  /** Show everything up to a time of the engine's clock. */
  seek(time) {
    if (time < this.time) this.rewind();
    this.time = time;
    for (const [name, lane] of Object.entries(this.lanes)) {
      const { events } = lane;
      const view = this.race.lanes[name];
      for (; events[lane.shown]?.at <= time; lane.shown++) view.take(events[lane.shown], this.ends(lane, lane.shown));
      const next = events[lane.shown];
      view.clock = lane.shown ? Math.min(time, last(lane).at) : 0;
      view.promptSeconds = last(lane).figures?.prompt_seconds ?? view.promptSeconds;
      view.guess(this.isDrafted(next) && next, next && this.ends(lane, lane.shown));
    }
    this.race.schedule();
    if (this.end && time >= this.horizon && !this.done) {
      this.done = true;
      this.race.finish(this.end);
    }
    this.moved();
  }

  /** Whether the end-of-text token is the last of an event. */
  ends({ events }, at) {
    return events[at + 1]?.figures?.finish_reason === "eos" && !events[at + 1].seconds;
  }

  /** Whether the draft of a round stands already, and the target reads it now. */
  isDrafted(event) {
    if (!event?.seconds || event.seconds.draft === null) return false;
    const { draft, all } = event.seconds;
    return event.k > 0 && this.time < Infinity && this.time >= event.at - all + draft;
  }

  // --- the pace

  /** Seconds that the slowest lane takes in the end, estimated from its tokens as long as it runs. */
  get length() {
    if (this.end || !this.request) return this.horizon;
    const most = this.request.settings.max_new_tokens;
    const lengths = Object.values(this.lanes).map((lane) => {
      const { at, figures } = last(lane);
      const known = figures ?? { tokens: 0 };
      const prompt = known.prompt_seconds ?? 0;
      return known.tokens > 1 && !finished(lane) ? prompt + ((at - prompt) * (most - 1)) / (known.tokens - 1) : at;
    });
    return Math.max(0, ...lengths);
  }

  /** Seconds of the engine's clock in a second of showing. */
  get rate() {
    if (typeof this.pace === "number") return this.pace;
    if (this.pace === "real") return 1;
    if (this.pace === "rounds" && this.limit > this.from) return (this.limit - this.from) / ROUND_SECONDS;
    return Math.min(1, this.length / SLOW_SECONDS) || 1;
  }

  /** The lane that is gone through round by round. */
  get stepped() {
    return this.lanes[this.race.stepped] ?? this.lanes.plain ?? { events: [] };
  }

  /** The time that is not gone beyond: what is known, and round by round the end of the round. */
  get limit() {
    const { horizon, stepped } = this;
    if (this.pace !== "rounds") return Math.max(this.time, horizon);
    const round = stepped.events[this.step];
    if (!round && this.live && !(stepped.events.length && finished(stepped))) return this.time; // the next is not known yet
    return Math.max(this.time, Math.min(horizon, round?.at ?? horizon));
  }

  /** Whether it waits for `next`. */
  get waits() {
    return this.pace === "rounds" && !this.done && this.time >= this.stepped.events[this.step]?.at;
  }

  /** Go on to the end of the next round. */
  next() {
    if (!this.waits) return;
    this.align();
    this.from = this.time;
    this.tick();
  }

  /** From where it is now, the next round is the first one that is not shown whole. */
  align() {
    const { events } = this.stepped;
    while (events[this.step]?.at <= this.time) this.step += 1;
  }

  /** Show all there is, and all that comes. */
  finish() {
    this.hurry = true;
    if (this.playing) this.tick();
  }

  play() {
    if (this.playing) return;
    this.playing = true;
    this.before = performance.now();
    this.from = this.time;
    this.tick();
  }

  /** Another pace, from here on. */
  go(pace) {
    this.pace = pace;
    this.from = this.time;
    if (pace === "rounds" && this.time > 0) this.align();
    if (this.playing) this.tick();
  }

  pause() {
    this.playing = false;
    clearTimeout(this.timer);
  }

  /** In real time, what it has waited for the engine is made up for when the end is known, a little at a time. */
  madeUp(passed) {
    if (this.live || this.pace !== "real") return 0;
    const seconds = Math.min(this.waited, passed * MAKE_UP);
    this.waited -= seconds;
    return seconds;
  }

  tick() {
    clearTimeout(this.timer);
    const now = performance.now();
    const passed = Math.max(0, now - this.before) / 1000;
    this.before = now;
    if (this.measures) return this.moved();
    if (this.hurry || this.pace === "once") this.seek(Infinity);
    else {
      const { limit } = this;
      const left = limit - this.time || 0; // or both are endless
      const step = passed * this.rate + this.madeUp(passed);
      if (this.live) this.waited += Math.max(0, step - left);
      this.seek(step < left ? this.time + step : limit);
    }
    if (this.done) return this.pause();
    const draws = !this.live || !(this.hurry || this.pace === "once");
    if (this.playing && draws) this.timer = setTimeout(() => this.tick(), TICK_MS);
  }

  /** In words, how the clock that is shown goes. */
  get scale() {
    if (!this.length || this.measures || this.request.guesses) return "";
    if (this.pace === "once") return "Shown as soon as it is measured.";
    const slower = 1 / this.rate;
    if (this.pace === "rounds") return "Shown one round at a time. The clocks show the measured time.";
    if (slower < 1.05) return "Shown in real time, as measured.";
    return `Slowed down ${slower < 10 ? slower.toFixed(1) : Math.round(slower)}×. The clocks show the measured time.`;
  }
}
