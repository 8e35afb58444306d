// Step through: one round of a recording, slowed down to its single decisions.
import * as sd from "../assets/page.js";
import { equals, line, make, many, millis, quoted, share } from "../assets/page.js";
import { roundOf, tiles } from "../race/round.js";
import { treeSteps } from "./tree_steps.js";

const SHOWN = 7; // tokens of a distribution; the rest is one bar
const RACED = 10; // tokens of an exponential race
const WHY = {
  r: "The target's own token takes the place of the rejected one",
  b: "All guesses were accepted, so the target's next token comes for free",
  t: "The target writes a token by itself",
};

export class Step {
  constructor(player) {
    this.player = player;
    this.node = sd.clone("sd-step").firstElementChild;
    this.parts = sd.parts(this.node);
    this.keys = {
      ArrowRight: () => this.go(1),
      ArrowLeft: () => this.go(-1),
      ArrowDown: () => player.round(1),
      ArrowUp: () => player.round(-1),
      Home: () => this.to(0),
      End: () => this.to(player.rounds.length - 1),
      Escape: () => {
        this.close();
        player.parts.through.focus();
      },
    };
    for (const button of this.node.querySelectorAll("[data-key]")) button.addEventListener("click", this.keys[button.dataset.key]);
  }

  get open() {
    return !this.node.hidden;
  }

  set open(open) {
    this.node.hidden = !open;
    this.player.root.classList.toggle("sd-stepping", open);
    this.player.parts.through.setAttribute("aria-expanded", String(open));
  }

  toggle() {
    if (this.open) this.close();
    else this.show();
  }

  /** Open at the round that is shown last; at the beginning, at the first one that drafted something. */
  show() {
    const { player } = this;
    player.pause();
    if (!player.rounds.length) return player.refuse("This recording has no round to step through.");
    const drafted = player.rounds.findIndex(({ k }) => k);
    this.open = true;
    this.node.style.minHeight = "";
    this.to(player.current < 0 ? Math.max(drafted, 0) : player.current);
    this.node.focus({ preventScroll: true });
    this.node.scrollIntoView({ block: "nearest" });
  }

  close() {
    if (!this.open) return;
    this.open = false;
    this.mark(-1);
  }

  /** The next step or the one before, over the ends of the round. */
  go(step) {
    const next = this.step + step;
    if (this.steps[next]) this.draw(next);
    else if (next < 0 && this.at > 0) this.to(this.at - 1, -1);
    else if (next > 0 && this.at + 1 < this.player.rounds.length) this.to(this.at + 1);
  }

  /** A round, at its first step or at its last. */
  to(at, step = 0) {
    const { player, parts } = this;
    this.at = at;
    player.jump(player.rounds[at].at);
    player.race.proof.clear(); // at the end of the last round
    this.read(player.rounds[at]);
    parts.title.textContent = `Round ${at + 1} of ${player.rounds.length}`;
    const { draft, verify } = this.seconds;
    parts.time.textContent = `${this.draft.length ? `drafting ${millis(draft)}, ` : ""}target pass ${millis(verify)}`;
    parts.steps.replaceChildren(...this.steps.map(({ name }) => make("li", "", name)));
    requestAnimationFrame(() => this.open && this.mark(player.rounds[at].index));
    this.draw(step < 0 ? this.steps.length - 1 : step);
  }

  /** What is known of a round, and the steps that show it. */
  read({ places, seconds }) {
    const { player } = this;
    const { temperature, rule } = player.data.request.settings;
    this.greedy = temperature === 0;
    this.matches = rule === "match" && !this.greedy;
    Object.assign(this, { seconds, places }, roundOf(player.show.lanes[player.lane], this.at));
    this.steps = this.tree ? treeSteps(this) : this.chainSteps();
    this.steps.push({ name: "cache", place: this.draft.length, draw: () => this.drawCache() });
  }

  /** All steps but the last, that of the cache. */
  chainSteps() {
    const steps = [{ name: "draft", draw: () => this.drawDraft() }];
    for (let place = 0; place < this.tested; place++) {
      steps.push({ name: `test ${place + 1}`, place, draw: () => this.drawTest(place) });
    }
    const kind = { r: this.greedy || this.matches ? "corrected" : "residual", b: "bonus", t: "target" }[this.last?.code];
    if (kind) steps.push({ name: kind, place: this.draft.length, draw: () => this.drawLast() });
    return steps;
  }

  /** Outline the round in the lane's text. */
  mark(index) {
    const { text, pane } = this.player.race.lanes[this.player.lane].parts;
    for (const node of text.querySelectorAll(".sd-now")) node.classList.remove("sd-now");
    const first = [...text.querySelectorAll(".tok")].find((token) => token.sdToken.event.index === index);
    if (index < 0 || !first) return;
    const now = first.closest(".sd-rd") || first; // a round without a draft has one token
    now.classList.add("sd-now");
    pane.scrollTop += now.getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight / 2;
  }

  draw(step) {
    this.step = step;
    [...this.parts.steps.children].forEach((item, at) => {
      if (at === step) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    });
    this.parts.row.replaceChildren(...tiles(this, this.steps[step].place ?? -1));
    const [words, ...body] = this.steps[step].draw();
    this.parts.words.textContent = words;
    this.parts.body.replaceChildren(...body);
    this.node.style.minHeight = `${this.node.offsetHeight}px`; // it never shrinks, so that the buttons stay where they are
  }

  drawDraft() {
    if (!this.draft.length) return ["Nothing is drafted in this round: the target reads the newest token and writes one more by itself."];
    const { draft, verify } = this.seconds;
    return [
      `The drafter guesses ${many(this.draft.length, "token")} in ${millis(draft)}. The target reads the draft in one pass of ${millis(verify)}, ` +
        "which computes the probability of every token at each position. Then the guesses are tested from left to right.",
    ];
  }

  drawTest(place) {
    const { text, code, p, q, draw } = this.draft[place];
    const passed = code === "a";
    const behind = this.draft.length - this.tested;
    const lost = passed || !behind ? "" : ` The ${many(behind, "guess", "guesses")} after it ${behind === 1 ? "is" : "are"} discarded untested.`;
    const head = `Guess ${place + 1} is ${quoted(text)}.`;
    const known = this.places[place];
    if (this.matches) {
      const drafter = q === 1 ? "The drafter names this token and no other." : `The drafter drew it with ${equals("q", q)} and the random numbers of this position.`;
      const verdict = passed
        ? `the same token, ${equals("p", p)}: it is accepted.`
        : `${quoted(this.last.text)}, ${equals("p", this.last.p)}, and not this token, ${equals("p", p)}: it is rejected.`;
      return [`${head} ${drafter} With the same random numbers the target draws ${verdict}${lost}`, ...(known ? [this.arrivals(known, true)] : [])];
    }
    const rows = this.distribution(place);
    const bars = rows ? [this.bars(rows, [["p", "target", "p"], ["q", "drafter", "q"]])] : [];
    if (this.greedy) {
      const verdict = passed ? "It is, so it is accepted." : "It is not, so it is rejected.";
      return [`${head} At temperature 0 a guess is accepted if it is the token that the target finds likeliest. ${verdict}${lost}`, ...bars];
    }
    if (p === null || q === null || draw === null) {
      return [`${head} It is ${passed ? "accepted" : "rejected"}. This recording does not hold p, q and the draw of its test.${lost}`, ...bars];
    }
    const chance = Math.min(1, p / q);
    const why =
      q === 1
        ? `The drafter names this token and no other, so q is 1. It is accepted with probability ${equals("p", p)}.`
        : p >= q
          ? `The target finds it as likely as the drafter does, or likelier: ${equals("p", p)}, ${equals("q", q)}. So it is sure to be accepted.`
          : `The target finds it less likely than the drafter does: ${equals("p", p)}, ${equals("q", q)}. It is accepted with probability ${equals("p / q", chance)}.`;
    const verdict = passed ? "which is below that: it is accepted." : "which is not below that: it is rejected.";
    return [`${head} ${why} The draw is ${share(draw)}, ${verdict}${lost}`, this.gauge(chance, draw, passed), ...bars];
  }

  /** How the target comes to a token of its own. */
  drew({ text, p }) {
    if (this.greedy) return `the target finds ${quoted(text)} likeliest`;
    return `the target draws ${quoted(text)} ${this.matches ? "with the random numbers of this position" : "from its own probabilities"}, ${equals("p", p)}`;
  }

  /** The probabilities that it was drawn from, where the recording holds them. */
  drawnFrom(place) {
    if (!place) return [];
    return [this.matches ? this.arrivals(place, false) : this.bars(this.ranked(place.candidates), [["p", "target", "p"]])];
  }

  drawLast() {
    const { text, code } = this.last;
    const place = this.greedy ? null : this.places[this.emitted - 1];
    const lacking = place || this.greedy ? "" : " This recording does not hold the other tokens.";
    if (this.greedy || this.matches || code !== "r") return [`${WHY[code]}: ${this.drew(this.last)}.${lacking}`, ...this.drawnFrom(place)];
    const words =
      "The token that takes the place of the rejected one is drawn from the residual: what the target has more of than the drafter, " +
      `max(0, p − q), scaled up to 1. With the accepted guesses, this gives every token exactly its p. Drawn: ${quoted(text)}.${lacking}`;
    if (!place) return [words];
    const left = place.residual;
    const residual = place.candidates.map(({ text: piece, p, q, mark }) => ({ text: piece, p: left ? Math.max(0, p - q) / left : 0, q: 0, mark: mark === "g" ? "" : mark }));
    return [words, this.bars(this.ranked(residual.filter(({ p, mark }) => p || mark)), [["residual", "residual", "p"]])];
  }

  drawCache() {
    const newest = (this.last ?? this.path[this.tested - 1]).text;
    const { rounds, data, show, lane } = this.player;
    const { prompt } = data.lanes[lane];
    const before = prompt + this.written - 1;
    const read = 1 + this.draft.length;
    const trimmed = read - this.emitted;
    const also = this.draft.length ? ` and ${many(this.draft.length, "guess", "guesses")}` : "";
    const end = trimmed ? `${trimmed} of them ${trimmed === 1 ? "is" : "are"} trimmed, which leaves ${before + this.emitted}.` : "All of them stay.";
    const words =
      `The target keeps a cache with one entry for each token it has read. This pass read the last token written${also}, ` +
      `so the cache grew from ${before} to ${many(before + read, "entry", "entries")}. ${end} ` +
      `${quoted(newest)} is not in it yet: the next pass reads it first.`;
    const cells = make("div", "sd-cache", make("span", "sd-cell sd-held", `prompt, ${prompt}`));
    if (this.written > 1) cells.append(make("span", "sd-cell sd-held", `text, ${this.written - 1}`));
    const pending = (this.at ? rounds[this.at - 1] : show.lanes[lane].events[0]).tokens.at(-1); // when the round began
    const stays = this.stays.slice(0, this.emitted);
    [pending, ...this.draft].forEach(({ text }, at) => {
      const kept = stays.includes(at);
      const cell = make("span", `sd-cell ${kept ? "sd-kept" : "sd-trimmed"}`, line(text));
      cell.title = kept ? "stays" : "trimmed";
      cells.append(cell);
    });
    return [words, cells];
  }

  // --- tables and bars

  /** The first of each exponential race: the target draws the token of the least e / p, the drafter that of the least e / q. */
  arrivals({ candidates }, drafted) {
    const races = [["The target's draw", "p"], ["The drafter's draw", "q"]].slice(0, drafted ? 2 : 1);
    const tables = races.map(([title, letter]) => {
      const times = candidates.map(({ text, e, [letter]: value }) => ({ text, value, time: e / value })).filter(({ value }) => value > 0);
      const rows = times.toSorted((one, other) => one.time - other.time).slice(0, RACED).map(({ text, value, time }, at) =>
        make("tr", at ? "" : "sd-first", make("td", "", make("code", "", quoted(text))), make("td", "", share(value)), make("td", "", time.toPrecision(3))),
      );
      const heads = ["token", letter, `e / ${letter}`].map((name) => make("th", "", name));
      return make("table", "", make("caption", "", `${title}: the smallest e / ${letter}, where e is the token's random number`), make("tr", "", ...heads), ...rows);
    });
    return make("div", "sd-arrivals", ...tables);
  }

  /** What was possible at a place where a guess was tested; null where nothing is known of it. */
  distribution(place) {
    const { text, code, p, q } = this.draft[place];
    if (!this.greedy && this.places[place]) return this.ranked(this.places[place].candidates);
    if (p === null || q === null) return null;
    const own = { text, p, q, mark: "g" };
    if (this.greedy && code === "x" && this.last) return [own, { text: this.last.text, p: 1, q: 0, mark: "d" }];
    return this.ranked([own]);
  }

  /** The likeliest candidates and those that matter here; then one without a text for everything else. */
  ranked(candidates) {
    const shown = candidates.toSorted((one, other) => Math.max(other.p, other.q) - Math.max(one.p, one.q));
    const kept = shown.filter(({ mark }, at) => at < SHOWN || mark);
    const rest = (letter) => Math.max(0, 1 - kept.reduce((sum, { [letter]: value }) => sum + value, 0));
    const others = { text: null, p: rest("p"), q: candidates.some(({ q }) => q) ? rest("q") : 0, mark: "" };
    return others.p > 0.0005 || others.q > 0.0005 ? [...kept, others] : kept;
  }

  /** Bars for each candidate, one for each distribution [name, title, letter]. */
  bars(candidates, distributions) {
    const key = distributions.map(([name, title]) => make("span", "", make("i", `sd-bar-${name}`), name === title ? title : `${name}, ${title}`));
    const most = Math.max(...candidates.flatMap((candidate) => distributions.map(([, , letter]) => candidate[letter]))) || 1;
    const lines = candidates.map((candidate) => {
      const { text, mark } = candidate;
      const label = text === null ? make("span", "sd-dist-others", "all others") : make("code", "", quoted(text));
      if (mark) label.append(make("small", "", mark === "g" ? "drafted" : this.greedy ? "likeliest" : "drawn"));
      const bars = distributions.map(([name, , letter]) => {
        const bar = make("i", `sd-bar-${name}`);
        bar.style.width = candidate[letter] ? `max(1px, ${(100 * candidate[letter]) / most}%)` : 0;
        return bar;
      });
      const numbers = distributions.map(([, , letter]) => make("b", "", share(candidate[letter])));
      return make("div", `sd-dist-row ${mark ? `sd-mark-${mark}` : ""}`, label, make("span", "sd-dist-bars", ...bars), make("span", "sd-dist-numbers", ...numbers));
    });
    return make("div", "sd-dist", make("p", "sd-dist-key", ...key), ...lines);
  }

  /** The chance of acceptance as a stretch from 0 to 1, and the draw as a mark on it. */
  gauge(chance, draw, passed) {
    const pass = make("i", "sd-gauge-pass");
    pass.style.width = `${chance * 100}%`;
    const mark = make("b", "sd-gauge-draw");
    mark.style.left = `${draw * 100}%`;
    const track = make("div", "sd-gauge-track", pass, mark);
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", `Chance of acceptance ${share(chance)}, draw ${share(draw)}`);
    const verdict = make("span", passed ? "sd-passes" : "sd-fails", passed ? "accepted" : "rejected");
    return make("div", "sd-gauge", make("span", "", `min(1, p/q) = ${share(chance)}`), track, verdict);
  }
}
