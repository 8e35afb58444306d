// The last races of this browser: they stay in it, and no server hears of them.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";

const KEY = "specdemo-races";
const VERSION = 1; // of what is kept
const MOST = 20;
const LONGEST_PROMPT = 200; // characters of a prompt's first line

/** Whatever else is kept there: another version, or what another page has left. */
const read = () => {
  try {
    const { version, races } = JSON.parse(sd.kept(KEY));
    return version === VERSION ? races.filter(({ when }) => Number.isFinite(when)) : [];
  } catch {
    return [];
  }
};

/** How fast the last race of a preset with each drafter was, by the drafter's name. */
export const lastSpeedUps = (preset) => {
  const own = read().filter((race) => race.preset === preset); // the newest first
  return new Map(own.reverse().map(({ drafter, ratio }) => [drafter, Number(ratio)]));
};

export class History {
  /** `again` is called with the query that fills in the form as it was. */
  constructor(element, again) {
    this.node = sd.clone("sd-mine").firstElementChild;
    Object.assign(this, { again, parts: sd.parts(this.node) });
    this.parts.forget.addEventListener("click", () => this.put([]));
    element.replaceChildren(this.node);
    this.show(read());
  }

  /** `query` is "" if no link can fill in the form. */
  add({ prompt, preset, drafter, settings, more = [], others = [] }, { speed_up: ratio, exactness }, query) {
    const [line] = prompt.trim().split("\n");
    const how = [
      drafter,
      drafter !== "none" && sd.draftSize(settings),
      more.length > 0 && sd.many(more.length, "more drafter"),
      others.length > 0 && `${others.length + 1} readers`,
      `temperature ${settings.temperature}`,
    ];
    const kept = { prompt: line.slice(0, LONGEST_PROMPT), preset, drafter, how: how.filter(Boolean).join(", ") };
    const race = { when: Date.now(), ...kept, ratio, exact: exactness.title, query };
    this.put([race, ...read()].slice(0, MOST));
  }

  put(races) {
    sd.keep(KEY, JSON.stringify({ version: VERSION, races }));
    this.show(races);
    page.offerDrafters?.();
  }

  show(races) {
    const most = Math.max(1, ...races.map(({ ratio }) => Number(ratio) || 0));
    this.node.hidden = !races.length;
    this.parts.title.textContent = `Your races (${races.length})`;
    this.parts.list.replaceChildren(...races.map((race) => this.row(race, most)));
  }

  /** What is kept may have been changed by others: it only becomes text. */
  row({ when, prompt, preset, how, ratio, exact, query }, most) {
    const bar = sd.make("i");
    bar.style.width = `${((Number(ratio) || 0) / most) * 100}%`;
    const time = new Date(when).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
    const again = sd.button("sd-button sd-run-again", "Run again", () => this.again(String(query)));
    Object.assign(again, { hidden: !query, title: "Fills in the form" });
    const cells = [["sd-when", time], ["sd-mine-prompt", prompt], ["sd-mine-how", `${preset}: ${how}`], ["sd-mine-exact", exact]];
    return sd.make(
      "li",
      "",
      sd.make("b", "", Number(ratio) ? `${Number(ratio).toFixed(2)}×` : "–"),
      sd.make("span", "sd-mine-bar", bar),
      ...cells.map(([name, text]) => sd.make("span", name, String(text))),
      again,
    );
  }
}
