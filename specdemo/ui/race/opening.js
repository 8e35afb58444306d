// What the page opens with: a recorded race in the arena, slowed down, with one caption at a time. It moves the clock of
// the show itself. Skip, Escape or Run ends it.
import * as sd from "../assets/page.js";
import { still } from "./show.js";

const TICK_MS = 40;
const READ = 3.2; // seconds for a caption
const GO_ON = 2.5; // and for what lies between the rounds that are explained
const REST = 6; // and for the rest of the race
const JUST = 1e-6; // seconds of the engine before a pass ends
const LEAD = 13; // rounds before those that are explained: something moves at once
const BEGINS = ["A language model, the target, writes the same text twice: alone, and with a drafter."];
const ALONE = ["Alone, it needs one pass, a run of the whole model, for every token: a word or a part of a word."];
const CAPTIONS = [
  ["The drafter, a small, fast helper, guesses the next tokens."],
  ["One pass of the target checks them all. It takes little longer than for one token: each pass reads all weights once."],
  ["It keeps each guess it would have written: ", ["a", "accepted"], "."],
  ["The first wrong guess is ", ["x", "rejected"], "; the target's own token replaces it: ", ["r", "corrected"], ". Later guesses are dropped: ", ["u", "untested"], "."],
  ["If all are right, the same pass gives one more token: ", ["b", "bonus"], "."],
];
const ENDS = ["So the target writes exactly the same text in fewer passes and less time."];
const HOW_ON = "Press Esc to skip it, or Run to start your own.";

const spans = (words) => words.map((part) => (typeof part === "string" ? part : sd.make("span", `tok ${part[0]}`, part[1])));

/** Whether a wrong guess and what took its place can be seen. */
const isSeen = ({ row: [, , tokens] }) => ["x", "r"].every((kind) => tokens.some(([text, code]) => code === kind && text.trim()));

/** Scenes [from, to, seconds, words]: the engine's time at their beginning and end, and how long they are shown. Explained
 *  are a round in which some guesses are right and one is wrong, and the next one whose guesses are all right. */
const scenes = ({ plain, speculative: { events } }) => {
  const rounds = events.filter(({ seconds }) => seconds);
  const is = (kinds) => ({ row }) => kinds.test(row[2].map(([, code]) => code).join(""));
  const [guess, read, keep, replace, add] = CAPTIONS;
  const wrong = rounds.slice(LEAD).filter(is(/^a+x/)).find(isSeen);
  const right = wrong && rounds.filter(is(/^aa+b$/)).find(({ at }) => at > wrong.at);
  const first = events[0].at; // its first token stands there at once
  const begins = ({ at, seconds: [draft, , all] }) => Math.max(first, at - all + draft); // the pass: the guesses are there
  const end = Math.max(events.at(-1).at, plain.events.at(-1).at);
  if (!right) return [[first, end, REST, BEGINS]];
  const halfway = (first + begins(wrong)) / 2;
  return [
    [first, halfway, READ, BEGINS],
    [halfway, begins(wrong), READ, ALONE],
    [begins(wrong), begins(wrong), READ, guess],
    [begins(wrong), wrong.at - JUST, READ, read],
    [wrong.at, wrong.at, READ, keep],
    [wrong.at, wrong.at, READ, replace],
    [wrong.at, begins(right), GO_ON, guess],
    [begins(right), right.at - JUST, GO_ON, read],
    [right.at, right.at, READ, add],
    [right.at, end, REST, ENDS],
  ];
};

export class Opening {
  /** `data` is a recording with the lanes of a usual race, see playable.py. */
  constructor(race, data) {
    const { request: { preset, drafter }, facts: { cores, device_name: device }, lanes } = data;
    const about = `A race of ${preset} with ${drafter}, recorded on ${cores} cores of ${device} and slowed down. ${HOW_ON}`;
    Object.assign(this, { race, about, scenes: scenes(lanes) });
    race.show.load(data, null, () => race.tellMemory(data.end));
  }

  play() {
    if (still()) return this.end();
    this.race.show.rewind();
    this.at = -1;
    this.next();
  }

  /** Whether the rounds that are explained are still to come: no guess of others fades beside theirs. */
  get leads() {
    return this.at < 3;
  }

  next() {
    this.at += 1;
    if (!this.scenes[this.at]) return this.end();
    this.began = performance.now();
    this.race.say("opening");
    this.race.root.toggleAttribute("data-explains", this.scenes[this.at][3] !== ENDS);
    this.race.words("", this.about);
    this.race.parts.sentence.replaceChildren(...spans(this.scenes[this.at][3]));
    this.tick();
  }

  tick() {
    clearTimeout(this.timer);
    const [from, to, seconds] = this.scenes[this.at];
    const shown = Math.min(1, (performance.now() - this.began) / 1000 / seconds);
    this.race.show.seek(from + (to - from) * shown);
    if (shown === 1) return this.next();
    this.timer = setTimeout(() => this.tick(), TICK_MS);
  }

  /** All of it, and all captions. */
  end() {
    clearTimeout(this.timer);
    const { race } = this;
    race.root.toggleAttribute("data-explains", false);
    race.show.seek(Infinity);
    race.say("opened");
    const { plain, speculative } = race.lanes;
    race.words(`The target, a language model, wrote the same text in ${speculative.passes} passes instead of ${plain.passes}.`);
    const list = sd.make("ol", "sd-captions");
    for (const words of CAPTIONS) list.appendChild(sd.make("li")).append(...spans(words));
    race.parts.why.replaceChildren(list);
    race.drawNow();
    race.moved();
  }

  /** Nothing of it is left. */
  clear() {
    clearTimeout(this.timer);
    this.race.root.toggleAttribute("data-explains", false);
    this.race.blank();
  }
}
