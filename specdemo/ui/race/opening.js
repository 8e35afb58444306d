// What the page opens with, from a recorded race in the arena: two of its rounds, large and slow, with one caption at a
// time, and then the race. It moves the clock of the show itself. Skip, Escape or Run ends it; Pause or Space holds it.
import * as sd from "../assets/page.js";
import { Figure } from "./figure.js";
import { roundOf, roundsOf } from "./round.js";
import { still } from "./show.js";

const TICK_MS = 40;
const ROUND = [
  ["guess", 2.6, ["A small, fast drafter guesses the next tokens: words or parts of words."]],
  ["read", 2.8, ["The target, the whole language model, checks them all in one pass. That takes little longer than a pass over one token."]],
  ["keep", 1.8, ["It keeps each guess it would have written: ", ["a", "accepted"], "."]],
  ["replace", 3.2, ["The first wrong guess is ", ["x", "rejected"], "; the target's own token replaces it: ", ["r", "corrected"], ". Later guesses are dropped: ", ["u", "untested"], "."]],
];
const NEXT = [
  ["read", 1.6, ["Another round: the drafter guesses, and one pass checks it all."]],
  ["add", 2.4, ["If all are right, the same pass gives one more token: ", ["b", "bonus"], "."]],
];
const RACE = [3.4, ["Now the race. Alone, the target needs a pass for every token. With the drafter it needs fewer."]];
const ENDS = [3.4, ["The target checks every word, so the text stays the same. Only the time is shorter."]];
const HOW_ON = "Press Esc to skip it, Space to pause it, or Run to start your own.";

const spans = (words) => words.map((part) => (typeof part === "string" ? part : sd.make("span", `tok ${part[0]}`, part[1])));

/** The rounds that are explained, by their places: one with right guesses, a wrong one and some after it, and
 *  another one whose guesses are all right. Neither breaks a line. */
export const explained = (rounds) => {
  const is = (kinds) => ({ tokens }) => kinds.test(tokens.map(({ code }) => code).join("")) && tokens.every(({ text }) => text.trim() && !text.includes("\n"));
  const found = [rounds.findIndex(is(/^a+xu/)), rounds.findLastIndex(is(/^aa+b$/))];
  return found.includes(-1) ? [] : found;
};

/** Scenes [from, to, seconds, words, round, phase]: the engine's time at their beginning and end, how long they are shown,
 *  and the round that stands in front of the lanes, if one does. */
const scenes = ({ plain, speculative }) => {
  const first = speculative.events[0].at; // its first token stands there at once
  const end = Math.max(speculative.events.at(-1).at, plain.events.at(-1).at);
  const half = (first + end) / 2;
  const large = explained(roundsOf(speculative)).flatMap((at, place) =>
    [ROUND, NEXT][place].map(([phase, seconds, words]) => [first, first, seconds, words, roundOf(speculative, at), phase]),
  );
  return [...large, [first, half, ...RACE], [half, end, ...ENDS]];
};

export class Opening {
  /** `data` is a recording with the lanes of a usual race, see playable.py. */
  constructor(race, data) {
    const { request: { preset, drafter }, facts: { cores, device_name: device } } = data;
    const about = `A race of ${preset} with ${drafter}, recorded on ${cores} cores of ${device}.`;
    Object.assign(this, { race, about, figure: new Figure(race.parts.figure), ending: data.end, machine: `${cores} cores of ${device}` });
    race.show.load(data, null);
    this.scenes = scenes(race.show.lanes);
  }

  /** Whoever wants no motion sees the end at once, and on demand all scenes as stills. */
  play(wanted = false) {
    if (still() && !wanted) return this.end();
    this.race.show.rewind();
    this.at = -1;
    this.hold(false);
    this.next();
  }

  next() {
    this.at += 1;
    const [, , , words, round, phase] = this.scenes[this.at] ?? [];
    if (!words) return this.end();
    this.began = performance.now();
    if (round) this.figure.show(round, phase);
    else this.figure.hide();
    this.race.say("opening");
    this.race.words("", `${this.about} ${this.race.howOn ?? HOW_ON}`);
    this.race.parts.sentence.replaceChildren(...spans(words));
    this.tick();
  }

  tick() {
    clearTimeout(this.timer);
    if (this.held) return;
    const [from, to, seconds] = this.scenes[this.at];
    const shown = Math.min(1, (performance.now() - this.began) / 1000 / seconds);
    this.race.show.seek(from + (to - from) * (still() ? 1 : shown));
    if (shown === 1) return this.next();
    this.timer = setTimeout(() => this.tick(), TICK_MS);
  }

  skipScene() {
    this.hold(false);
    this.next();
  }

  /** Pause it, or go on. */
  hold(held = !this.held) {
    const now = performance.now();
    if (held) this.since = now;
    else if (this.held) this.began += now - this.since;
    this.held = held;
    this.race.root.toggleAttribute("data-held", held);
    this.race.moved();
    if (!held && this.at >= 0) this.tick();
  }

  /** All of it, and what happened in short. */
  end() {
    this.leave();
    const { race } = this;
    race.show.seek(Infinity);
    race.say("opened");
    const { plain, speculative } = race.lanes;
    race.words(`The target wrote the same text in ${speculative.passes} passes instead of ${plain.passes}.`, this.about);
    race.speed(this.ending);
    race.charts.onePass.start(this.ending);
    race.badge(this.ending.exactness.title, this.ending.exactness.mark);
    race.drawNow();
    race.moved();
    race.proof.show(this.ending.exactness);
  }

  leave() {
    clearTimeout(this.timer);
    this.held = false;
    this.race.root.toggleAttribute("data-held", false);
    this.figure.hide();
  }

  /** Nothing of it is left. */
  clear() {
    this.leave();
    this.race.blank();
  }
}
