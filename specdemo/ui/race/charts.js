// The figures of a race: plain HTML bars, drawn from the numbers that the server sends.
import * as sd from "../assets/page.js";
import { OnePass } from "./why.js";

const FIGURES = [
  ["acceptance_rate", "Acceptance rate (of tested)", sd.percent,
    "Accepted / tested: of the guesses that were tested, how many passed. It says how well the drafter predicts the target."],
  ["draft_efficiency", "Draft efficiency (of drafted)", sd.percent,
    "Accepted / drafted: of all guesses, how many were used. Those after a rejected one are lost, so it falls as K grows."],
  ["tokens_per_round", "Tokens per round", (value) => sd.number(value, 2),
    "How many tokens one pass of the target wrote on average, the corrected or bonus token included. Without a drafter it is 1."],
];
const LANES = [["plain", "alone"], ["drafted", "drafted"]];
const TABLE = [
  ["Writing", (stats, writing) => sd.times(writing)],
  ["In all", (stats, writing, inAll) => sd.times(inAll)],
  ["Passes", ({ passes }) => String(passes)],
  ["Tokens/s", ({ tokens_per_second: rate }) => sd.number(rate, 1)],
  ["Acceptance rate", ({ acceptance_rate: rate }) => sd.percent(rate)],
  ["Tokens per round", ({ tokens_per_round: tokens }, writing) => (writing ? sd.number(tokens, 2) : "–")],
];
const TTFT = "How long the lane took to read the prompt and write the first token.";
const PARTS = [
  ["prefill", "reading the prompt", (s) => s.ttft_seconds],
  ["draft", "drafting", (s) => s.draft_seconds],
  ["verify", "target passes", (s) => s.verify_seconds],
  ["other", "other", (s) => s.other_seconds],
];
const heading = (scope, text) => Object.assign(sd.make("th", "", text), { scope });

export class Charts {
  /** `parts` are those of the arena. */
  constructor({ behind, figures, histogram, table, times, rows }) {
    Object.assign(this, { histogram, table, rows, onePass: new OnePass(behind) });
    const entries = [...FIGURES.map(([name, title, , words]) => [name, title, words]), ...LANES.map(([lane, title]) => [lane, `First token, ${title}`, TTFT])];
    this.values = Object.fromEntries(
      entries.map(([name, title, words]) => {
        const value = sd.make("dd", "", "–");
        figures.append(Object.assign(sd.make("dt", "", title), { tabIndex: 0, sdWhy: [title, words] }), value);
        return [name, value];
      }),
    );
    times.append(sd.make("ul", "sd-key", ...PARTS.map(([part, words]) => sd.make("li", "", sd.make("i", `sd-${part}`), words))));
  }

  /** How long a lane took; its title only if there are several with a drafter. */
  timeRow(lane, title, place) {
    const parts = Object.fromEntries(PARTS.map(([part]) => [part, sd.make("i", `sd-${part}`)]));
    const bar = sd.make("div", "sd-timebar", ...Object.values(parts).toReversed()); // the first lies on top of those that reach further
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", title);
    const total = sd.make("b", "", "–");
    const row = sd.make("div", "sd-time", sd.make("span", "", title), bar, total);
    row.dataset.place = place;
    this.rows.append(row);
    this.times[lane] = { bar, parts, total };
  }

  /** A row for each lane, and a column for each of its figures. */
  tableRow(lane, title, place) {
    this.cells[lane] = TABLE.map(() => sd.make("td", "", "–"));
    const row = sd.make("tr", "", heading("row", title), ...this.cells[lane]);
    row.dataset.place = place;
    this.body.append(row);
  }

  /** Nothing is known of these lanes yet; `k` is the draft length of the one with a drafter, if it is one. */
  clear(lanes, k) {
    Object.assign(this, { lanes, times: {}, cells: {}, bars: [], body: sd.make("tbody") });
    this.rows.replaceChildren();
    const head = sd.make("tr", "", ...["Lane", ...TABLE.map(([name]) => name)].map((name) => heading("col", name)));
    this.table.replaceChildren(sd.make("thead", "", head), this.body);
    Object.entries(lanes).forEach(([name, { name: title }], place, { length }) => {
      this.timeRow(name, length > 2 ? title : LANES[place][1], place);
      if (length > 2) this.tableRow(name, title, place);
    });
    this.histogram.replaceChildren();
    this.grow(k);
    this.histogram.setAttribute("aria-label", "No rounds yet");
    for (const value of Object.values(this.values)) value.textContent = "–";
  }

  /** Columns for 0 to `longest` accepted tokens; with K = auto no one knows beforehand how many there will be. */
  grow(longest) {
    while (this.bars.length <= longest) {
      const [count, bar] = [sd.make("b"), sd.make("i")];
      this.histogram.append(sd.make("div", "sd-column", count, sd.make("div", "sd-grow", bar), sd.make("span", "", this.bars.length)));
      this.bars.push([bar, count]);
    }
  }

  /** The figures of each lane; the last ones come with the `end`, see `Outcome.ending`. */
  show(stats, end = null) {
    const [plain, drafted] = Object.keys(this.lanes).map((lane) => stats[lane]);
    for (const [name, , format] of FIGURES) this.values[name].textContent = format(drafted[name]);
    [plain, drafted].forEach(({ tokens, ttft_seconds: first }, place) => {
      this.values[LANES[place][0]].textContent = tokens ? `${Math.round(first * 1000)} ms` : "–";
    });
    for (const [lane, cells] of Object.entries(this.cells)) {
      const figures = { ...stats[lane], passes: this.lanes[lane].passes };
      TABLE.forEach(([, read], at) => sd.put(cells[at], read(figures, end?.speed_ups[lane], end?.speed_ups_in_all[lane])));
    }
    this.showLengths(drafted.accepted_lengths, end);
    const longest = Math.max(...Object.values(stats).map(({ seconds }) => seconds)) || 1;
    for (const [lane, row] of Object.entries(this.times)) this.showTime(row, stats[lane], longest, end);
    if (end) this.onePass.start(end);
  }

  showLengths(lengths, end) {
    this.grow(Math.max(0, ...Object.keys(lengths)));
    const most = Math.max(1, ...Object.values(lengths));
    this.bars.forEach(([bar, count], length) => {
      const rounds = lengths[length] || 0;
      bar.style.transform = `scaleY(${rounds / most})`;
      count.textContent = rounds || "";
    });
    if (!end) return;
    const words = Object.entries(lengths).map(([length, rounds]) => `${length} accepted in ${sd.many(rounds, "round")}`);
    this.histogram.setAttribute("aria-label", words.join(", ") || "Nothing was drafted");
  }

  showTime({ bar, parts, total }, stats, longest, end) {
    const words = [];
    let to = 0;
    for (const [part, name, read] of PARTS) {
      const seconds = read(stats); // null where a server does not tell it
      to += seconds ?? 0;
      parts[part].style.width = `${(100 * to) / longest}%`;
      if (seconds !== null) words.push(`${name} ${seconds.toFixed(2)} s`);
    }
    total.textContent = `${stats.seconds.toFixed(2)} s`;
    if (end) bar.setAttribute("aria-label", words.join(", "));
  }
}
