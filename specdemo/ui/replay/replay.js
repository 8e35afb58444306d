// The player of recordings, in the place of the race: feeds the messages of a race to an arena by the clock of the recording (see playable.py).
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { Race } from "../race/race.js";
import { roundsOf } from "../race/round.js";
import { gunzip, textOf } from "../share/packing.js";
import { Step } from "./step.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4];
// Space plays wherever it does nothing else: also on the scrubber, on the tab that is open and in a lane's text.
const SPACE_IS_TAKEN = "button:not([aria-selected=true]), input:not([type=range]), select, textarea, dialog[open]";
const KEYS_ARE_TAKEN = "input, select, textarea, dialog[open]";
const PANE_KEYS = ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"]; // they move in the text
const RACE = ":race"; // chosen instead of a recording
const FILE = ":file";
const READY = ["A recording.", "Press Play, go round by round, or step through a round."];
const PLAYING = ["Playing a recording.", "Pause to go round by round or to step through a round. The speeds are next to the clock."];
const PAUSED = ["A recording, paused.", "Press Play to go on, go round by round, or step through a round."];
const WHOSE = {
  recording: "A recording that ships with this page, not measured here.",
  race: "The last race on this page.",
  file: "From your file, not measured here.",
  link: "From a link, not measured here.",
  saved: "A race that was saved in this file.",
};

const tooLarge = (limit) => `This file is too large: a trace has at most ${limit / 1e6} MB.`;

/** What the script plays for the text of a trace. */
export const posted = (text) => sd.fetched("/replays", { method: "POST", body: text });

class Replay {
  constructor(element, props, server) {
    element.replaceChildren(sd.clone("sd-replay"));
    element.classList.add("sd-replay");
    Object.assign(this, { root: element, server, limit: props.limit, parts: sd.parts(element) });
    this.files = Object.fromEntries(props.recordings.map(({ name, file }) => [name, file]));
    this.race = new Race(this.parts.replayed, () => {}, server);
    this.show = this.race.show;
    this.show.moved = () => this.moved();
    this.step = new Step(this);
    this.race.parts.front.after(this.step.node);
    this.race.openRound = (at) => this.openRound(at);
    this.which = this.parts.which;
    this.chosen = ""; // what is shown, by its name in the list
    this.opens = null; // when the round ends that is to be stepped through
    this.fill(props.recordings);
    this.buttons();
    this.speed(1);
    this.ready(false);
  }

  fill(recordings) {
    const groups = {};
    for (const { name, category, prompt, settings } of recordings) {
      groups[category] ??= Object.assign(sd.make("optgroup"), { label: category });
      groups[category].append(new Option(`${prompt.trim().split("\n")[0]} (${settings})`, name));
    }
    const file = Object.assign(new Option("Your file", FILE), { hidden: true });
    this.which.append(...Object.values(groups), new Option("The last race on this page", RACE), file);
  }

  buttons() {
    const { parts } = this;
    parts.which.addEventListener("change", () => this.choose());
    parts.file.addEventListener("change", () => this.upload(parts.file));
    parts.scrub.addEventListener("input", () => this.go(Number(parts.scrub.value)));
    const clicks = {
      leave: () => page.showRace(),
      open: () => parts.file.click(),
      play: () => this.toggle(),
      restart: () => this.go(0),
      back: () => this.round(-1),
      on: () => this.round(1),
      through: () => this.step.toggle(),
    };
    for (const [name, act] of Object.entries(clicks)) parts[name].addEventListener("click", act);
    parts.speeds.append(...SPEEDS.map((speed) => sd.button("sd-button", `${speed}×`, () => this.speed(speed))));
    parts.player.addEventListener("click", ({ target, detail }) => detail && target.blur()); // Space is for playing
    document.addEventListener("keydown", (event) => this.key(event));
  }

  speed(speed) {
    this.show.pace = speed;
    for (const button of this.parts.speeds.children) {
      button.setAttribute("aria-pressed", String(button.textContent === `${speed}×`));
    }
  }

  /** Nothing can be played before something is loaded. */
  ready(is) {
    for (const control of this.root.querySelectorAll(".sd-player :is(button, input)")) control.disabled = !is;
  }

  // --- what is played

  choose() {
    const name = this.which.value;
    if (name === RACE) this.last();
    else if (name !== FILE) this.load(sd.fetched(`/recordings/${this.files[name]}`));
  }

  /** The race that was run last. */
  last(at = null) {
    this.which.value = RACE;
    this.opens = at;
    if (page.race?.traceRun) this.load(this.server.race(page.race.traceRun));
    else this.refuse("No race has been run on this page yet. Go back and run one.");
  }

  async upload(input) {
    const [file] = input.files;
    if (!file) return;
    input.value = ""; // so that the same file can be opened again
    this.which.value = FILE;
    if (file.size > this.limit) return this.refuse(tooLarge(this.limit));
    const packed = file.name.endsWith(".gz");
    const unpacking = (this.loading = textOf(packed ? gunzip(file.stream()) : file.stream(), this.limit).catch((error) => ({ error })));
    const text = await unpacking;
    if (unpacking !== this.loading) return; // another was chosen meanwhile
    if (text.error) return this.refuse(text.error instanceof RangeError ? tooLarge(this.limit) : "This file cannot be unpacked.");
    this.load(posted(text));
  }

  /** What is not in the list: what the script plays, or an error, as JSON. */
  take(answer) {
    this.which.value = FILE;
    return this.load(answer);
  }

  /** What was there stays, in the list too. */
  refuse(sentence) {
    this.loading = null;
    this.which.value = this.chosen;
    this.parts.refused.textContent = sentence;
  }

  async load(answer) {
    this.pause();
    this.parts.refused.textContent = "";
    const loading = (this.loading = answer);
    let data;
    try {
      data = JSON.parse(await answer);
    } catch {
      data = { error: "The recording could not be fetched." };
    }
    if (loading !== this.loading) return; // another was chosen meanwhile
    if (data.error) return this.refuse(data.error);
    this.step.close();
    this.data = data;
    this.chosen = this.which.value;
    this.describe();
    this.show.load(data, data.end, () => this.opened());
    this.lane = [this.race.stepped, ...Object.keys(data.lanes)].find((lane) => data.lanes[lane]); // gone through round by round
    this.rounds = roundsOf(this.show.lanes[this.lane]);
    this.parts.scrub.max = this.end;
    this.ready(true);
    this.jump(0);
    if (this.opens !== null) this.openRound(Math.max(this.opens, this.rounds[0].at));
    this.opens = null;
  }

  /** Step through the round that ends at a time. */
  openRound(at) {
    this.pause();
    this.jump(at);
    this.step.show();
  }

  describe() {
    const { request, facts, kind, note } = this.data;
    const { temperature } = request.settings;
    this.parts.prompt.textContent = request.prompt.trim();
    const { dtype, weights_dtype: weights, device_name: device, cores } = facts;
    const stored = weights && weights !== dtype && `${weights} weights`;
    const where = [request.preset, dtype, stored, device, cores && `${cores} cores`];
    const how = [request.drafter, sd.draftSize(request.settings), `temperature ${temperature}`];
    this.parts.facts.textContent = [WHOSE[kind], note, [...where, ...how].filter(Boolean).join(" · ")].filter(Boolean).join(" ");
  }

  // --- the clock

  get end() {
    return this.show.horizon;
  }

  /** The clock of the show has moved. */
  moved() {
    const { time } = this.show;
    const { scrub, play, time: clock } = this.parts;
    scrub.value = time;
    const words = `${time.toFixed(2)} of ${this.end.toFixed(2)} s`;
    scrub.setAttribute("aria-valuetext", words);
    sd.put(clock, words);
    if (this.show.playing && !this.root.offsetParent) this.pause();
    play.textContent = this.show.playing && !this.show.done ? "Pause" : "Play";
    this.tellHow();
  }

  /** The arena has been cleared. */
  opened() {
    for (const [name, lane] of Object.entries(this.race.lanes)) {
      const recorded = this.data.lanes[name];
      lane.node.hidden = !recorded;
      if (recorded?.title) lane.title(recorded.title);
    }
    this.caption = "";
  }

  /** Until it has ended: what it does, and what can be done. */
  tellHow() {
    if (this.show.done || !this.data) return;
    const how = this.show.playing ? PLAYING : this.show.time > 0 ? PAUSED : READY;
    if (how !== this.caption) this.race.words(...how);
    this.caption = how;
  }

  /** To a time at once; playing goes on from there. */
  jump(time) {
    this.show.seek(Math.min(Math.max(time, 0), this.end));
    this.race.drawNow();
  }

  /** The same, and what was stepped through is left. */
  go(time) {
    this.step.close();
    this.jump(time);
  }

  /** To the end of the next round or of the one before; the other lane is shown as far as it was then. */
  round(step) {
    this.pause();
    if (this.step.open) return this.step.to(Math.min(Math.max(this.step.at + step, 0), this.rounds.length - 1));
    const at = this.current + step;
    this.jump(at < 0 ? 0 : at < this.rounds.length ? this.rounds[at].at : this.end);
  }

  /** The newest round that is shown whole; -1 before the first. */
  get current() {
    return this.rounds.findLastIndex(({ at }) => at <= this.show.time);
  }

  toggle() {
    if (this.show.playing) this.pause();
    else this.play();
  }

  play() {
    this.step.close();
    if (this.show.done) this.jump(0);
    this.show.play();
  }

  pause() {
    if (this.show.playing) this.race.drawNow();
    this.show.pause();
    this.parts.play.textContent = "Play";
    this.tellHow();
  }

  // --- keys

  key(event) {
    const { target, key } = event;
    if (!this.root.offsetParent || !this.data || event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.closest?.(key === " " ? SPACE_IS_TAKEN : KEYS_ARE_TAKEN)) return;
    if (PANE_KEYS.includes(key) && target.closest?.(".sd-pane")) return;
    const at = SPEEDS.indexOf(this.show.pace);
    const keys = {
      " ": () => this.toggle(),
      "+": () => this.speed(SPEEDS[Math.min(at + 1, SPEEDS.length - 1)]),
      "-": () => this.speed(SPEEDS[Math.max(at - 1, 0)]),
      t: () => this.step.toggle(),
      h: () => this.race.parts.hide.click(),
      ...(this.step.open
        ? this.step.keys
        : {
            ArrowRight: () => this.round(1),
            ArrowLeft: () => this.round(-1),
            Home: () => this.jump(0),
            End: () => this.jump(this.end),
          }),
    };
    const act = keys[key] || keys[key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

export const mountReplay = (element, props, watch, trigger, server) => (page.mountedReplay = [element, props, server]);

/** The player, which is made when it is first needed. */
export const player = () => (page.replay ??= new Replay(...page.mountedReplay));

/** The player, shown in the place of the race. */
const shown = () => {
  sd.openTab("Race");
  document.querySelector("#stage").toggleAttribute("data-recordings", true);
  return player();
};

page.showRecordings = () => shown().chosen || player().choose();
/** Step through the race that was run last, from the round that ends at a time. */
page.showReplay = (at = 0) => shown().last(at);
/** Play what is not in the list, see `take`. */
page.openReplay = (answer) => shown().take(answer);
