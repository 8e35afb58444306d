// The figures of a race: plain HTML bars, drawn from the numbers that the server sends.
import * as sd from "../assets/page.js";

const FIGURES = [
  ["acceptance_rate", "Acceptance rate", sd.percent,
    "Accepted / tested: of the drafted tokens that were tested, how many passed. It says how well the drafter knows the target."],
  ["draft_efficiency", "Draft efficiency", sd.percent,
    "Accepted / drafted: of all drafted tokens, how many were used. Those after a rejected one are lost, so it falls as K grows."],
  ["tokens_per_round", "Tokens per round", (value) => sd.number(value, 2),
    "How many tokens one pass of the target wrote on average, the resampled or bonus token included. Without a drafter it is 1."],
];
const LANES = [["plain", "alone"], ["drafted", "drafted"]];
const TABLE = [
  ["Speed-up", (stats, ratio) => (ratio ? `${ratio.toFixed(2)}×` : "–")],
  ["Passes", ({ passes }) => passes],
  ["Tokens/s", ({ tokens_per_second: rate }) => sd.number(rate, 1)],
  ["Acceptance rate", ({ acceptance_rate: rate }) => sd.percent(rate)],
  ["Tokens per round", ({ tokens_per_round: tokens }, ratio) => (ratio ? sd.number(tokens, 2) : "–")],
];
const TTFT = "How long the lane took to read the prompt and write the first token.";
const PARTS = [
  ["prefill", "reading the prompt", (s) => s.ttft_seconds],
  ["draft", "drafting", (s) => s.draft_seconds],
  ["verify", "target passes", (s) => s.verify_seconds],
  ["other", "other", (s) => s.other_seconds],
];

export class Charts {
  constructor(root) {
    this.values = {};
    const list = root.querySelector(".sd-figures");
    const row = (name, title, words) => {
      const term = sd.make("dt", "", title);
      term.tabIndex = 0;
      term.sdWhy = [title, words];
      list.append(term, (this.values[name] = sd.make("dd", "", "–")));
    };
    for (const [name, title, , words] of FIGURES) row(name, title, words);
    for (const [lane, title] of LANES) row(lane, `First token, ${title}`, TTFT);
    this.histogram = root.querySelector(".sd-histogram");
    this.table = root.querySelector(".sd-table");
    this.rows = root.querySelector(".sd-time-rows");
    const key = sd.make("ul", "sd-key");
    for (const [part, words] of PARTS) {
      const item = sd.make("li", "", words);
      item.prepend(sd.make("i", `sd-${part}`));
      key.append(item);
    }
    root.querySelector(".sd-times").append(key);
  }

  /** How long a lane took; its title only if there are several with a drafter. */
  timeRow(lane, title, place) {
    const row = sd.make("div", "sd-time");
    row.dataset.place = place;
    const bar = sd.make("div", "sd-timebar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", title);
    const parts = Object.fromEntries(PARTS.map(([part]) => [part, sd.make("i", `sd-${part}`)]));
    bar.append(...Object.values(parts).reverse()); // the first part lies on top of those that reach further
    const total = sd.make("b", "", "–");
    row.append(sd.make("span", "", title), bar, total);
    this.rows.append(row);
    this.times[lane] = { bar, parts, total };
  }

  /** A row for each lane, and a column for each of its figures. */
  tableRow(lane, title, place) {
    const row = this.body.insertRow();
    row.dataset.place = place;
    const head = sd.make("th", "", title);
    head.scope = "row";
    row.append(head);
    this.cells[lane] = TABLE.map(() => {
      const cell = row.insertCell();
      cell.textContent = "–";
      return cell;
    });
  }

  /** Nothing is known of these lanes yet; `k` is the draft length of the one with a drafter, if it is one. */
  clear(lanes, k) {
    this.lanes = lanes;
    this.times = {};
    this.cells = {};
    this.rows.replaceChildren();
    this.table.replaceChildren();
    this.body = this.table.createTBody();
    const head = this.table.createTHead().insertRow();
    head.append(...["Lane", ...TABLE.map(([name]) => name)].map((name) => Object.assign(sd.make("th", "", name), { scope: "col" })));
    Object.entries(lanes).forEach(([name, { name: title }], place, { length }) => {
      this.timeRow(name, length > 2 ? title : LANES[place][1], place);
      if (length > 2) this.tableRow(name, title, place);
    });
    this.bars = [];
    this.histogram.replaceChildren();
    this.grow(k);
    this.histogram.setAttribute("aria-label", "No rounds yet");
    for (const value of Object.values(this.values)) value.textContent = "–";
  }

  /** Columns for 0 to `longest` accepted tokens; with K = auto no one knows beforehand how many there will be. */
  grow(longest) {
    while (this.bars.length <= longest) {
      const column = sd.make("div", "sd-column");
      const count = sd.make("b", "", "");
      const bar = sd.make("i");
      const track = sd.make("div", "sd-grow");
      track.append(bar);
      column.append(count, track, sd.make("span", "", String(this.bars.length)));
      this.bars.push([bar, count]);
      this.histogram.append(column);
    }
  }

  /** The figures of each lane, and how many times as fast as the target alone it is; `last`, that they are the last. */
  show(stats, ratios, last) {
    const [plain, drafted] = Object.keys(this.lanes).map((lane) => stats[lane]);
    for (const [name, , format] of FIGURES) this.values[name].textContent = format(drafted[name]);
    [plain, drafted].forEach(({ tokens, ttft_seconds: first }, place) => {
      this.values[LANES[place][0]].textContent = tokens ? `${Math.round(first * 1000)} ms` : "–";
    });
    for (const [lane, cells] of Object.entries(this.cells)) {
      const figures = { ...stats[lane], passes: this.lanes[lane].passes };
      TABLE.forEach(([, read], at) => sd.put(cells[at], String(read(figures, ratios[lane]))));
    }
    this.showLengths(drafted.accepted_lengths, last);
    const longest = Math.max(...Object.values(stats).map(({ seconds }) => seconds)) || 1;
    for (const [lane, row] of Object.entries(this.times)) this.showTime(row, stats[lane], longest, last);
  }

  showLengths(lengths, last) {
    this.grow(Math.max(0, ...Object.keys(lengths)));
    const most = Math.max(1, ...Object.values(lengths));
    this.bars.forEach(([bar, count], length) => {
      const rounds = lengths[length] || 0;
      bar.style.transform = `scaleY(${rounds / most})`;
      count.textContent = rounds || "";
    });
    if (!last) return;
    const words = Object.entries(lengths).map(([length, rounds]) => `${length} accepted in ${rounds} ${rounds === 1 ? "round" : "rounds"}`);
    this.histogram.setAttribute("aria-label", words.join(", ") || "Nothing was drafted");
  }

  showTime({ bar, parts, total }, stats, longest, last) {
    const words = [];
    let end = 0;
    for (const [part, name, read] of PARTS) {
      const seconds = read(stats); // null where a server does not tell it
      end += seconds ?? 0;
      parts[part].style.width = `${(100 * end) / longest}%`;
      if (seconds !== null) words.push(`${name} ${seconds.toFixed(2)} s`);
    }
    total.textContent = `${stats.seconds.toFixed(2)} s`;
    if (last) bar.setAttribute("aria-label", words.join(", "));
  }
}
