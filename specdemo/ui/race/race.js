// The arena: takes the messages of a run (see messages.py) and draws them.
import { Job } from "../assets/job.js";
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { sentence } from "../assets/top.js";
import { Charts } from "./charts.js";
import { Lane } from "./lane.js";
import { Opening } from "./opening.js";
import { Proof } from "./proof.js";
import { PACE, PACES, Show } from "./show.js";
import { scaleOf, wholeScale } from "./strip.js";
import { tooltips } from "./tooltip.js";
import { Wall, draftedLanes, readersOf } from "./wall.js";

const FIGURES_MS = 80; // between two times that figures and charts are drawn
const USUAL_K = 4; // where it is not known how many tokens of a draft can be accepted
const NARROW = 900; // px; there the arena lies below the form, see race.css
const LEGEND = "arbx"; // the kinds of tokens that are always shown; the help names all
const IN_SIGHT = 100; // px of the lanes that must be in the window
const SPEED_UPS = [
  "Speed-up",
  "Writing: the speed with the drafter divided by that of the target alone, after the prompt is read. The extra time of the first draft is left out. In all: the time of the target alone divided by that with the drafter, prompt included.",
];
const DISTURBED = "Disturbed: another page was served during this race, so its timing may be off.";

/** The whole arena inside one gr.HTML; a replay has one of its own. */
export class Race extends Job {
  kind = "race";
  name = "The race";

  constructor(element, trigger, server) {
    super();
    element.replaceChildren(sd.clone("sd-race"));
    element.classList.add("sd-arena");
    Object.assign(this, { root: element, trigger, server, lanes: {}, parts: sd.parts(element) });
    this.legend();
    this.charts = new Charts(this.parts);
    this.show = new Show(this, () => this.moved());
    this.proof = new Proof(this);
    this.game = page.Game ? new page.Game(this) : null; // a saved race has none
    this.state = "idle";
    this.listen();
    tooltips(element);
    this.say("idle");
    this.blank();
  }

  /** Nothing of a race is there. */
  blank() {
    this.proof.clear();
    this.lanes = {};
    this.lay([["plain", "Target alone"], ["speculative", "With a drafter"]]);
    for (const count of Object.values(this.legendCounts)) sd.put(count, "0");
    this.charts.clear(this.lanes, USUAL_K);
    this.speed();
    this.show.clear();
    this.moved();
  }

  listen() {
    const { parts, show } = this;
    parts.pace.append(...Object.entries(PACES).map(([name, words]) => new Option(words, name)));
    parts.pace.value = show.pace;
    parts.pace.addEventListener("change", () => {
      sd.keep(PACE, parts.pace.value);
      show.go(parts.pace.value);
      this.moved();
    });
    const clicks = {
      next: () => show.next(),
      hold: () => this.opening.hold(),
      skip: () => (this.state === "opened" ? this.opening.play(true) : this.skip()),
      again: () => page.showReplay(),
      share: () => page.share?.open(),
      recordings: () => page.showRecordings(),
      guess: () => this.game?.begin(),
      watch: () => page.showSharing(),
      stage: () => page.stage.toggle(),
    };
    for (const [name, act] of Object.entries(clicks)) parts[name].addEventListener("click", act);
    this.root.addEventListener("round", ({ detail: at }) => this.openRound(at));
  }

  /** The end of the race that is shown whole, of the page's own or of the recording that it opened with. */
  get result() {
    if (this.busy || this.is("opening")) return null;
    return this.is("opened") ? this.opening.ending : this.show.done ? this.show.end : null;
  }

  /** Step through the round that ends at a time. */
  openRound(at) {
    if (!this.parts.again.hidden) page.showReplay(at);
  }

  /** The page is open: the arena goes to its place there, if it has begun in front of it, see ahead.js. */
  settle() {
    const focused = document.activeElement;
    this.home.replaceChildren(this.root);
    if (this.root.contains(focused)) focused.focus({ preventScroll: true });
    document.querySelector(".sd-ahead")?.remove();
  }

  /** Begin with a recorded race, unless somebody has pressed Run before it is here. */
  open(file) {
    this.root.toggleAttribute("data-opens", true); // on a phone it comes before the form until Run is pressed
    return this.explain(sd.fetched(`/recordings/${file}`));
  }

  /** Play a recorded race with captions, unless something else has begun before its text is here. See `Opening.play`. */
  async explain(recording, wanted = false) {
    const { state } = this;
    const text = await recording.catch(() => null); // the page can do without
    if (!text || !this.is(state)) return;
    this.opening?.clear();
    this.opening = new Opening(this, JSON.parse(text));
    this.opening.play(wanted);
  }

  legend() {
    this.legendCounts = {};
    for (const [code, name, words] of sd.KINDS.filter(([code]) => LEGEND.includes(code))) {
      const count = (this.legendCounts[code] = sd.make("b", "", "0"));
      const item = sd.make("li", "", sd.make("span", `tok ${code}`, name), count);
      this.parts.legend.append(Object.assign(item, { sdWhy: [name, words] }));
    }
  }

  /** The panes of lanes [name, title]; those of several readers lie in blocks with `titles`. */
  lay(named, titles = null) {
    const names = named.map(([name]) => name);
    if (names.join() !== Object.keys(this.lanes).join()) {
      this.lanes = Object.fromEntries(names.map((name, at) => [name, new Lane(name, titles ? Number(at >= names.length / 2) : at)]));
      this.wall = titles && new Wall(Object.values(this.lanes), titles);
      this.parts.panes.replaceChildren(...(this.wall?.blocks ?? Object.values(this.lanes)).map(({ node }) => node));
      this.root.toggleAttribute("data-many", !titles && names.length > 2);
      this.root.dataset.readers = this.wall?.readers ?? 1;
    }
    for (const [name, title] of named) this.lanes[name].title(title);
  }

  get drafted() {
    return Object.values(this.lanes).slice(this.wall?.readers ?? 1);
  }

  /** The lanes by name that the figures tell apart. */
  get groups() {
    return this.wall?.groups ?? this.lanes;
  }

  /** The name of the lane that is gone through round by round. */
  get stepped() {
    return Object.keys(this.lanes)[this.wall?.readers ?? 1];
  }

  /** The clock of the show has moved, or another pace was chosen. */
  moved() {
    const { show, parts } = this;
    const opened = this.is("opened");
    parts.measured.hidden = !(show.measures && this.is("running"));
    if (show.measures) parts.measured.value = show.measured;
    sd.put(parts.scale, this.is("opening", "opened") ? "A recording." : show.scale);
    parts.next.hidden = show.pace !== "rounds" || !this.is("running", "showing");
    parts.next.disabled = !show.waits;
    parts.hold.hidden = !this.is("opening");
    sd.put(parts.hold, this.opening?.held ? "Go on" : "Pause");
    parts.skip.hidden = !this.is("showing", "opening", "opened");
    sd.put(parts.skip, opened ? "Again" : "Skip");
    parts.again.hidden = !(this.is("ended") || (this.is("failed") && show.end));
    parts.share.hidden = this.busy || this.is("opening");
  }

  mark(state) {
    this.state = state;
    this.root.dataset.state = state;
    this.parts.front.inert = this.is("idle", "opening"); // there is nothing to read yet
    if (this === page.race) document.querySelector("#stage")?.toggleAttribute("data-busy", this.busy); // then there is a Stop
    this.moved();
  }

  words(sentence, more = "") {
    const reads = this.game?.playing && this.is("waiting", "loading");
    this.parts.sentence.textContent = reads ? this.game.doing : sentence;
    this.badge("", "");
    this.parts.why.textContent = reads ? sentence : more;
    this.inShort([], "");
    this.behind({});
  }

  badge(title, mark) {
    this.parts.badge.textContent = title;
    this.parts.badge.dataset.mark = mark;
  }

  /** Three figures, each with a sentence for those who point at it, and the verdict's sentence on all. */
  inShort(chips, sentence) {
    this.parts.finding.textContent = sentence;
    const shown = chips.map(({ name, value, sentence: own }) => {
      const chip = sd.make("span", "sd-fact", sd.make("b", "", value), ` ${name}`);
      return Object.assign(chip, { tabIndex: 0, sdWhy: [`${value} ${name}`, own] });
    });
    this.parts.chips.replaceChildren(...shown);
  }

  /** What the verdicts rest on, for those who ask. */
  behind(verdicts) {
    const known = Object.entries(verdicts).filter(([, verdict]) => verdict.numbers.length);
    const parts = known.flatMap(([lane, { sentence, notes, numbers }]) => {
      const list = sd.make("dl", "", ...numbers.flatMap(([name, value]) => [sd.make("dt", "", name), sd.make("dd", "", value)]));
      const words = known.length > 1 ? [`${lane}: ${sentence}`, ...notes] : notes;
      return [...words.map((text) => sd.make("p", "", text)), list];
    });
    this.parts.numbers.replaceChildren(...parts);
  }

  /** Run was pressed, maybe by its key far from the arena; nothing has come back yet. */
  press(values) {
    if (this.is("showing")) this.skip();
    if (this.busy) return;
    const opens = this.is("opening", "opened");
    this.game?.pressed();
    super.press();
    this.values = values;
    sd.problem("");
    if (opens) this.opening.clear();
    this.root.toggleAttribute("data-opens", false);
    document.querySelector("#stage").toggleAttribute("data-recordings", false);
    if (window.innerWidth <= NARROW) this.root.scrollIntoView({ behavior: "smooth" });
    const { stage, preset, words } = page.status ?? {};
    if (stage === "loading" && preset === page.preset) this.doing(words);
  }

  /** What begins now can be seen, wherever the button was. */
  comeIntoSight() {
    const { top, bottom } = this.parts.panes.getBoundingClientRect();
    if (bottom < IN_SIGHT || top > window.innerHeight - IN_SIGHT) this.root.scrollIntoView({ behavior: "smooth" });
  }

  over(sentence, state) {
    this.show.pause();
    const began = this.is("running", "showing");
    super.over(sentence, state);
    this.game?.failed();
    if (!this.is("failed")) return;
    sd.problem(sentence);
    if (began || !this.show.end) return this.speed();
    this.finish(this.show.end); // the race before stays
    this.say("failed");
  }

  stop() {
    this.skip();
    super.stop();
  }

  /** What is known is shown at once. */
  skip() {
    if (this.is("opening")) this.opening.end();
    if (this.is("running", "showing")) this.show.finish();
  }

  apply(message) {
    for (const each of this.game?.taken(message) ?? [message]) this.take(each);
  }

  take(message) {
    if (message.status) this.status(message.status);
    if (message.start) {
      this.show.start(message.start);
      if (message.start.guesses) this.show.finish();
      this.show.play();
      if (!message.start.guesses) this.comeIntoSight();
    }
    if (message.end) this.measured();
    if (message.lanes) this.show.add(message.lanes, message.end);
  }

  asked(values) {
    return this.game?.asked(values) ?? values;
  }

  /** The engine is free again; what it did goes on being shown. */
  measured() {
    this.traceRun = this.run;
    this.say("showing");
    this.racing();
  }

  racing() {
    this.words(this.show.request.isolated ? "Running one lane after the other." : "Racing.", "Point at a token to see its test.");
  }

  status(status) {
    page.showStatus(status);
    if (status.stage !== "loading") return;
    this.say("loading");
    this.doing(status.words);
  }

  /** What the server does before a race can begin. */
  doing(words) {
    this.words(`${sentence(words)}.`, "Then the race starts.");
  }

  start(request) {
    this.proof.clear();
    this.game?.started(request);
    this.say("running");
    if (request.others?.length) this.lay(...readersOf(request));
    else this.lay([["plain", "Target alone"], ...draftedLanes(request)]);
    for (const lane of Object.values(this.lanes)) lane.clear(request.settings);
    this.due = 0;
    this.scale = null;
    const { k, tree } = request.settings;
    const [drafts, many] = [request.drafter !== "none", this.drafted.length];
    this.charts.clear(this.groups, !drafts ? 0 : tree || !Number.isFinite(k) ? USUAL_K : k);
    this.parts.whose.textContent = many === 1 ? "" : `Counted in all ${many} lanes with a drafter together.`;
    this.speed();
    this.parts.spoken.textContent = "";
    this.parts.measured.max = request.settings.max_new_tokens * Object.keys(this.lanes).length;
    if (this.show.measures) this.words("Measuring the race.");
    else this.racing();
  }

  finish(end) {
    this.draw();
    this.drawFigures(performance.now());
    const verdicts = end.verdicts ?? {};
    const lanes = Object.values(verdicts);
    this.speed(end, lanes.length > 0 && lanes.every(({ slower }) => slower));
    const why = [end.advice, end.exactness.words, end.disturbed && DISTURBED].filter(Boolean).join(" ");
    const short = end.headline || end.sentence;
    this.words(end.stopped ? `Stopped. ${short}` : short, why);
    this.inShort(end.chips, end.headline && end.sentence);
    this.behind(verdicts);
    this.badge(end.exactness.title, end.exactness.mark);
    this.parts.spoken.textContent = `The race is over. ${short} ${end.exactness.title}. ${end.headline && end.sentence}`.trim();
    this.wall?.drawFigures(["plain", "speculative"].map((group) => end.stats[group].tokens_per_second_of_all));
    this.charts.show(end.stats, end);
    if (this.values && this.is("showing")) page.share?.raced(this, this.values, end); // it was run here, and is new
    this.say("ended");
    this.draw(); // the strips as a whole
    if (this.show.request.guesses) this.game.shown(end);
    else this.proof.show(end.exactness);
  }

  /** How many tokens the best lane with a drafter is ahead of the other: a ratio would drift until the end. */
  lead() {
    const { drafted, wall } = this;
    const [alone] = Object.values(this.lanes);
    if (!alone.tokens || !drafted.some(({ counts }) => counts.a + counts.x > 0)) return this.speed();
    const tokens = wall ? wall.lead : Math.max(...drafted.map((lane) => lane.tokens)) - alone.tokens;
    sd.put(this.parts.ratio, `${tokens < 0 ? "−" : "+"}${Math.abs(tokens)}`);
    sd.put(this.parts.measure, tokens < 0 ? "tokens behind" : "tokens ahead");
  }

  /** Of a race that is over. Only the verdict knows what is noise: until then nothing is called slower. */
  speed({ speed_up: ratio, speed_up_in_all: inAll } = {}, slower = false) {
    const { ratio: large, measure } = this.parts;
    sd.put(large, sd.times(ratio));
    sd.put(measure, ratio ? sd.inAll(inAll) : "speed-up");
    measure.sdWhy = ratio && SPEED_UPS;
    large.toggleAttribute("data-slower", slower);
  }

  /** All of it in the next frame, also the figures and charts. */
  drawNow() {
    this.due = 0;
    this.schedule();
  }

  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const lanes = Object.values(this.lanes);
    const now = performance.now();
    const strips = (this.wall?.blocks ?? lanes).map(({ strip }) => strip);
    this.scale = scaleOf(strips, this.scale);
    const scale = this.is("ended", "opened") ? wholeScale(strips, this.scale) : this.scale;
    for (const strip of strips) strip.draw(scale);
    for (const lane of lanes) lane.draw();
    if (this.is("running", "showing", "opening", "opened") && now >= this.due) this.drawFigures(now);
    // After everything else: it makes the browser lay out what has changed.
    for (const lane of lanes) lane.scroll();
    for (const strip of strips) strip.scroll();
  }

  drawFigures(now) {
    const { lanes, drafted, wall } = this;
    this.due = now + FIGURES_MS;
    for (const lane of Object.values(lanes)) lane.drawFigures();
    wall?.drawFigures();
    for (const [code, node] of Object.entries(this.legendCounts)) {
      sd.put(node, String(drafted.reduce((sum, { counts }) => sum + counts[code], 0)));
    }
    if (this.is("running", "showing", "opening")) this.lead();
    const figures = wall?.figures ?? Object.fromEntries(Object.entries(lanes).map(([name, lane]) => [name, lane.figures]));
    if (Object.keys(this.groups).every((name) => figures[name])) this.charts.show(figures);
  }
}

export const mountRace = (element, props, watch, trigger, server) => {
  page.race ??= new Race(element.firstElementChild, trigger, server);
  Object.assign(page.race, { trigger, server, home: element, recording: props.recording, attract: props.attract });
  page.race.lookAt(page.race.root);
  watch("value", () => page.race.receive(JSON.parse(props.value)));
};
