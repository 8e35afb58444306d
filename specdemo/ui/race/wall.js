// Several readers at once: a wall of small lanes, in a block without the drafter and in one with it.
import * as sd from "../assets/page.js";
import { Strip } from "./strip.js";

/** The names of the drafted lanes, of all `lanes` of a race those after the first, and their titles. */
export const draftedLanes = ({ drafter, settings, more = [], lanes }) => {
  const drafting = [{ drafter, ...settings }, ...more];
  const tree = settings.tree ? `, ${sd.draftSize(settings)}` : "";
  if (lanes.length <= 2) return [["speculative", drafter === "none" ? "With no drafter" : `With ${drafter}${tree}`]];
  const title = (lane) => (lane.drafter === "you" ? sd.people(lane) : `${lane.drafter}, ${sd.draftSize(lane)}`);
  return lanes.slice(1).map((name, at) => [name, drafting[at] ? title(drafting[at]) : name]);
};

/** What is asked of several readers, see request.py: the lanes [name, title] and the titles of the blocks. */
export const readersOf = ({ drafter, prompt, others }) => {
  const prompts = [prompt, ...others].map((text, at) => `${at + 1}. ${sd.line(text.trim())}`);
  const lanes = ["alone", drafter].flatMap((who) => prompts.map((title, at) => [`${who} ${at + 1}`, title]));
  return [lanes, ["Target alone", drafter === "none" ? "With no drafter" : `With ${drafter}`]];
};

const sum = (lanes, read) => lanes.reduce((total, lane) => total + (read(lane) ?? 0), 0);

/** The one of which `read` is largest, of those that are there. */
const most = (all, read) => all.filter(Boolean).reduce((found, one) => (found && read(found) >= read(one) ? found : one), null);

export class Wall {
  /** `lanes` are those without a drafter, then as many with it. */
  constructor(lanes, titles) {
    this.readers = lanes.length / titles.length;
    this.blocks = titles.map((name, place) => {
      const mine = lanes.slice(place * this.readers, (place + 1) * this.readers);
      const [all, each] = [sd.make("b", "", "–"), sd.make("b", "", "–")];
      const figures = [sd.make("p", "sd-of-all", all, " tokens/s"), sd.make("p", "sd-of-each", each, ` for each of ${this.readers}`)];
      figures[0].tabIndex = 0;
      figures[0].sdWhy = ["Tokens per second", `All ${this.readers} prompts together. After the race it covers the time in which all of them were decoded.`];
      const head = sd.make("header", "", sd.make("h2", "", name), ...figures);
      const strip = sd.make("div", "sd-strip", sd.make("canvas"));
      Object.assign(strip, { role: "img", tabIndex: 0, ariaLabel: "The passes to scale, with their drafts and the tokens of all readers" });
      const shared = new Strip(strip);
      for (const lane of mine) lane.strip = shared; // a pass reads for all of them
      const node = sd.make("section", "sd-block", head, strip, sd.make("div", "sd-wall", ...mine.map((lane) => lane.node)));
      Object.assign(node.dataset, { place });
      node.setAttribute("aria-label", name);
      return { name, node, all, each, strip: shared, lanes: mine };
    });
    const [plain, speculative] = this.blocks;
    this.groups = { plain, speculative };
  }

  /** How many tokens all readers with a drafter are ahead of those without. */
  get lead() {
    const [alone, drafted] = this.blocks.map(({ lanes }) => sum(lanes, ({ tokens }) => tokens));
    return drafted - alone;
  }

  /** The figures of each group so far, as those of a lane: of all its readers, the times of the one that took longest.
   *  Null before anything is known of both. */
  get figures() {
    const groups = Object.entries(this.groups).map(([name, { lanes }]) => {
      const newest = most(lanes.map(({ ofAll }) => ofAll), ({ at }) => at);
      const longest = most(lanes.map(({ figures }) => figures), ({ seconds }) => seconds);
      return [name, newest && { ...longest, ...newest.figures }];
    });
    return groups.every(([, figures]) => figures) ? Object.fromEntries(groups) : null;
  }

  /** The speed of all readers together and of each, by default of what is shown so far. */
  drawFigures(rates = this.blocks.map(({ lanes }) => sum(lanes, ({ rate }) => rate))) {
    this.blocks.forEach(({ all, each }, place) => {
      sd.put(all, rates[place] ? rates[place].toFixed(rates[place] < 100 ? 1 : 0) : "–");
      sd.put(each, rates[place] ? (rates[place] / this.readers).toFixed(1) : "–");
    });
  }
}
