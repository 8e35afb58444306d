// A finished race as a picture: how much faster it was, whether the text is the same, the passes to scale and the text.
// It is drawn as it was at any time of the race, so a film is made of the same pictures.
import * as sd from "../assets/page.js";
import { drawPass, coloursOf } from "../race/strip.js";
import { isLocal } from "../watch/share.js";

const [LEFT, RIGHT] = [56, 1144]; // px of a picture of 1200 x 630
const SAME = "the same text, word for word";
const FACTS = 500; // px from the left
const LANES = [300, 412]; // px from the top
const [STRIP, TALLER] = [46, 1.35]; // px that a strip is high in a lane, and how many times as high it is here
const TEXT = { top: 546, line: 40, lines: 2, size: 25 };
const COLOURS = ["page", "ink", "soft", "line", "accent", "a", "r", "b"];

/** How the tokens of a text lie in lines of a width. */
const laidOut = (brush, events, width) => {
  const placed = [];
  let [line, x] = [0, 0];
  for (const { at, tokens } of events) {
    for (const token of tokens.filter(({ emitted }) => emitted)) {
      const text = sd.line(token.text);
      const wide = brush.measureText(text).width;
      if (x > 0 && x + wide > width) [line, x] = [line + 1, 0];
      placed.push({ at, code: token.code, text, line, x, wide });
      x += wide;
    }
  }
  return placed;
};

export class Picture {
  constructor(canvas) {
    Object.assign(this, { canvas, brush: canvas.getContext("2d") });
  }

  /** Take a race that is over; `machine` says in words where it ran. */
  take(race, machine) {
    const { request, lanes: known } = race.show;
    const end = race.result;
    const best = Object.entries(end.speed_ups).filter(([name]) => race.lanes[name]);
    const drafted = best.sort(([, a], [, b]) => b - a)[0]?.[0] ?? race.stepped;
    const score = request.guesses && race.game?.scores; // of a game, in which speed does not count
    const names = score ? Object.keys(race.lanes).slice(1, 3).reverse() : [Object.keys(race.lanes)[0], drafted];
    const style = getComputedStyle(race.root);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--sd-${name}`)]));
    this.fonts = ["--font", "--font-mono"].map((name) => style.getPropertyValue(name));
    this.font(TEXT.size, 400, 1);
    this.lanes = names.map((name, at) => ({
      title: race.wall ? `${race.wall.blocks[at].name}, reader 1` : race.lanes[name].name,
      strip: race.lanes[name].strip,
      colours: coloursOf(race.lanes[name].node),
      placed: laidOut(this.brush, known[name].events, RIGHT - LEFT),
    }));
    Object.assign(this, {
      large: score ? sd.number(score[0][1], 2) : sd.times(end.speed_up),
      measure: score ? "tokens per pass" : end.speed_up ? sd.inAll(end.speed_up_in_all) : "speed-up",
      slower: race.parts.ratio.hasAttribute("data-slower"),
      same: end.exactness.mark === "same" && (!end.stopped || Boolean(score)),
      exact: end.exactness.title,
      prompt: `“${sd.line(request.prompt.trim())}”`,
      facts: score ? this.played(race.game, request, machine) : [...this.settings(request, race), machine],
      length: Math.max(...this.lanes.map(({ strip }) => strip.end)),
    });
    const facts = [(score || end.speed_up) && `${this.large} ${this.measure}`, this.same ? SAME : this.exact, this.prompt, ...this.facts];
    this.canvas.setAttribute("aria-label", `${facts.filter(Boolean).join(". ")}.`);
  }

  /** Of a game three lines: the tokens per pass of all, from where they are counted, and what played where. */
  played({ named, since }, { preset, settings }, machine) {
    return [named.join(", "), since, `${preset}, temperature ${settings.temperature}, ${machine}`];
  }

  /** Two lines: the model with its drafter, which of several lanes is the one that is drawn, and the settings. */
  settings({ preset, drafter, settings }, { wall, drafted }) {
    const one = wall || drafted.length === 1;
    const who = !one ? this.lanes[1].title : drafter === "none" ? "no drafter" : drafter;
    const size = one && drafter !== "none" && sd.draftSize(settings);
    const readers = wall && `${wall.readers} readers at once`;
    return [`${preset} with ${who}`, [size, `temperature ${settings.temperature}`, readers].filter(Boolean).join(", ")];
  }

  font(size, weight = 400, mono = 0) {
    this.brush.font = `${weight} ${size}px ${this.fonts[mono]}`;
  }

  /** Text at a place; what is too wide for its room is cut. Returns where it ends. */
  write(text, x, y, { size = 24, weight = 400, colour = "ink", right = RIGHT } = {}) {
    const { brush } = this;
    this.font(size, weight);
    brush.fillStyle = this.colours[colour];
    let shown = text;
    while (shown.length > 1 && brush.measureText(shown).width > right - x) shown = `${shown.slice(0, -2)}…`;
    brush.fillText(shown, x, y);
    return x + brush.measureText(shown).width;
  }

  /** As it was after a share of the race, by default when it was over. */
  draw(share = 1) {
    const { brush, canvas, colours } = this;
    brush.fillStyle = colours.page;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    const at = this.write("spec", LEFT, 66, { size: 34 });
    this.write("demo", at, 66, { size: 34, weight: 800, colour: "accent" });
    this.write(this.prompt, FACTS, 66, { size: 26 });
    if (!isLocal()) this.write(window.location.host + window.location.pathname, LEFT, 616, { size: 20, colour: "soft" });
    this.board(share);
    this.lanes.forEach((lane, place) => this.lane(lane, LANES[place], share * this.length));
    this.text(share);
  }

  board(share) {
    const over = share === 1;
    const [alone, drafted] = this.lanes.map((lane) => this.tokens(lane, share * this.length));
    const lead = drafted - alone;
    const large = over ? this.large : `${lead < 0 ? "−" : "+"}${Math.abs(lead)}`;
    this.write(large, LEFT - 4, 200, { size: large.length > 5 ? 104 : 128, weight: 800, colour: over && this.slower ? "r" : "accent" });
    this.write(over ? this.measure : lead < 0 ? "tokens behind" : "tokens ahead", LEFT, 244, { size: 30, weight: 600, right: FACTS - 20 });
    if (over) {
      const end = this.write(this.same ? SAME : this.exact, FACTS, 118, { size: 34, weight: 700, right: RIGHT - 40 });
      if (this.same) this.write("✓", end + 12, 118, { size: 34, weight: 700, colour: "a" });
    }
    this.facts.forEach((fact, line) => this.write(fact, FACTS, 164 + 40 * line, { size: 26, colour: line ? "soft" : "ink" }));
  }

  /** How many tokens of a lane stand there at a time after its first token. */
  tokens({ strip, placed }, time) {
    return placed.filter(({ at }) => at - strip.began <= time).length;
  }

  lane({ title, strip, colours, placed }, top, time) {
    const { brush } = this;
    const done = strip.passes.filter(({ to }) => to <= time);
    const seconds = strip.began + Math.min(time, strip.end);
    const words = `${sd.many(this.tokens({ strip, placed }, time), "token")} in ${sd.many(done.length + 1, "pass", "passes")}, ${seconds.toFixed(2)} s in all`;
    this.font(24);
    const left = RIGHT - brush.measureText(words).width;
    this.write(words, left, top, { colour: "soft" });
    this.write(title, LEFT, top, { weight: 700, right: left - 30 });
    brush.save();
    brush.translate(LEFT, top + 10);
    brush.scale(1, TALLER);
    const scale = (RIGHT - LEFT) / this.length;
    for (const pass of done) drawPass(brush, pass, scale, STRIP, colours);
    brush.restore();
    brush.fillStyle = this.colours.line;
    brush.fillRect(LEFT, top + 10 + STRIP * TALLER, RIGHT - LEFT, 1);
  }

  /** The text of the lane with a drafter: at the end how it begins, before that what was written last. */
  text(share) {
    const { brush, colours } = this;
    const { strip, placed } = this.lanes[1];
    const shown = placed.filter(({ at }) => at - strip.began <= share * this.length);
    const first = share === 1 ? 0 : Math.max(0, (shown.at(-1)?.line ?? 0) - TEXT.lines + 1);
    this.font(TEXT.size, 400, 1);
    for (const { code, text, line, x, wide } of shown) {
      const top = TEXT.top + (line - first) * TEXT.line;
      if (line < first || line >= first + TEXT.lines) continue;
      const colour = "arb".includes(code || "-") && colours[code];
      if (colour) {
        Object.assign(brush, { fillStyle: colour, globalAlpha: 0.18 });
        brush.fillRect(LEFT + x, top - TEXT.size, wide, TEXT.line - 5);
        brush.globalAlpha = 1;
        if (code !== "b") brush.fillRect(LEFT + x, top + 6, wide, 2);
      }
      brush.fillStyle = colours.ink;
      brush.fillText(text, LEFT + x, top);
    }
  }
}
