// Why one pass is enough: a picture to scale, computed by the formula of studies/theory.py from the values of a race.
import * as sd from "../assets/page.js";

const EXAMPLE = { k: 4, acceptance: 0.7, draft: 0.08, row: 0.05, at_once: false, gigabytes: 0 };
const FROM_EXAMPLE = "These values are an example. After a race whose costs are known the sliders start from that race.";
const PASSES = [1, 3, 5]; // tokens of the passes that are drawn
const WRITTEN = 12; // tokens of both time lines
const SLIDERS = ["k", "acceptance", "draft"];

/** A mean round in passes of the target alone: see `Costs` and `speed_up` of theory.py.
 *  `draft` is the cost of a guess, or of all of a draft that is made `at_once`; `row` is what each guess adds to a pass. */
export const computed = ({ k, acceptance, draft, row, at_once: atOnce }) => {
  let tokens = 0;
  for (let place = 0; place <= k; place++) tokens += acceptance ** place;
  const drafting = (atOnce ? 1 : k) * draft;
  const round = drafting + 1 + row * k;
  return { tokens, drafting, round, speedUp: tokens / round };
};

/** A name, a bar and a number. */
const rowOf = (list) => {
  const [name, bar, value] = [sd.make("span"), sd.make("i"), sd.make("b")];
  list.append(sd.make("li", "", name, sd.make("div", "", bar), value));
  return { name, bar, value };
};

/** `length` is a share of the whole width; the bar repeats a part of it, of which the `first` share has a colour of its own. */
const draw = (row, name, value, length, part, first) => {
  sd.put(row.name, name);
  sd.put(row.value, value);
  row.bar.style.width = `${100 * length}%`;
  row.bar.style.setProperty("--part", `${100 * part}%`);
  row.bar.style.setProperty("--first", `${100 * part * first}%`);
};

export class OnePass {
  /** In front of an element of the arena. */
  constructor(next) {
    next.before(sd.clone("sd-one-pass"));
    const node = next.previousElementSibling;
    this.parts = sd.parts(node);
    this.passes = [...PASSES, 0].map(() => rowOf(this.parts.passes));
    this.lines = [rowOf(this.parts.lines), rowOf(this.parts.lines)];
    node.addEventListener("input", () => this.show());
    this.start({});
  }

  /** Take the values of a race from its end, see `Outcome.ending`. */
  start({ formula, speed_up: measured }) {
    const { parts } = this;
    this.race = formula ?? EXAMPLE;
    for (const name of SLIDERS) parts[name].value = this.race[name];
    const { at_once: atOnce, gigabytes, row } = this.race;
    sd.put(parts.unit, atOnce ? "A draft costs" : "A guess costs");
    sd.put(parts.whose, formula ? `The values are those of this race, which measured ${sd.times(measured)} writing.` : FROM_EXAMPLE);
    const size = gigabytes ? ` (${gigabytes.toFixed(2)} GB)` : "";
    sd.put(parts.weights, `A pass reads the weights${size} once, whether for 1, 3 or 5 tokens. Here each further token makes a pass ${(100 * row).toFixed(1)}% longer.`);
    this.show();
  }

  show() {
    const { parts, passes, lines } = this;
    const values = { ...this.race, ...Object.fromEntries(SLIDERS.map((name) => [name, parts[name].valueAsNumber])) };
    const { k, row } = values;
    const { tokens, drafting, round, speedUp } = computed(values);
    const [passed, draft] = [sd.percent(values.acceptance), values.draft.toFixed(2)];
    parts.acceptance.ariaValueText = passed;
    parts.draft.ariaValueText = `${draft} passes`;
    [k, passed, draft].forEach((text, at) => sd.put(parts[`${SLIDERS[at]}Is`], String(text)));
    const cost = (rows) => 1 + row * (rows - 1);
    const widest = cost(Math.max(k + 1, ...PASSES));
    [...PASSES, k + 1].forEach((rows, at) => {
      const name = at < PASSES.length ? sd.many(rows, "token") : `K + 1 = ${rows}`;
      passes[at].name.style.setProperty("--tokens", rows);
      draw(passes[at], name, sd.times(cost(rows)), cost(rows) / widest, 1, 1 / cost(rows));
    });
    const time = (WRITTEN / tokens) * round;
    const longest = Math.max(WRITTEN, time);
    draw(lines[0], "target alone", WRITTEN.toFixed(1), WRITTEN / longest, 1 / WRITTEN, 0);
    draw(lines[1], `with K = ${k}`, time.toFixed(1), time / longest, tokens / WRITTEN, drafting / round);
    sd.put(parts.computed, sd.times(speedUp));
    const slower = speedUp < 1 ? ", so slower" : "";
    sd.put(parts.claim, `With K = ${k}, ${passed} accepted and a draft of ${drafting.toFixed(2)} passes, a round writes ${tokens.toFixed(2)} tokens in the time of ${round.toFixed(2)} passes: ${speedUp.toFixed(2)} times as fast as the target alone${slower}. Computed, not measured.`);
  }
}
