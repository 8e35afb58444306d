// The form: its examples, and links that fill it in.
import { restFrames } from "../assets/frames.js";
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { missing } from "../assets/top.js";
import { lastSpeedUps } from "../share/history.js";
import { fieldsOf, openRace } from "../share/links.js";

// --- the examples

const last = { kind: null, at: 0, prompt: "" }; // that was shown

/** The next example of a kind, for the prompt: another one than it has. */
export const example = ([kind, prompts]) => {
  last.at = kind === last.kind ? last.at + 1 : 0;
  if (last.prompt !== null && prompts[last.at % prompts.length] === document.querySelector("#prompt textarea").value) last.at++;
  last.kind = kind;
  return (last.prompt = prompts[last.at % prompts.length]);
};

/** Put an example of the kind that was chosen last into the form, by its place or the next; it resolves when it is there. */
export const pick = async (at = last.at + 1) => {
  const kinds = [...document.querySelectorAll("#examples button")];
  const field = document.querySelector("#prompt textarea");
  last.kind ??= kinds[0].textContent.trim().toLowerCase();
  Object.assign(last, { at: at - 1, prompt: null });
  kinds.find(({ textContent }) => textContent.trim().toLowerCase() === last.kind).click();
  for (let frames = 0; field.value !== last.prompt && frames < 60; frames++) await new Promise(requestAnimationFrame);
};

/** The line that opens the settings. */
export const inShort = ([drafter, k, auto, tree, temperature]) => {
  const size = sd.draftSize({ k: auto ? "auto" : k, tree });
  return { label: `${drafter}, ${size}, temperature ${temperature}: change`, __type__: "update" };
};

// --- the drafters: a few of them, or all; one that the preset cannot use has the reason, and is not chosen

const FEW = 4;
const REFUSED = " – not here: "; // page.css greys a choice that holds it
const before = []; // what each list had

/** The drafters of all lists: what each does, and how fast it was, or why it cannot be used. */
const offered = ({ drafters, speed_ups }) => {
  const last = lastSpeedUps(page.preset);
  return drafters.map(([words, name]) => {
    if (name in missing()) return [`${words}${REFUSED}${missing()[name]}`, name];
    const measured = speed_ups[page.preset]?.[name];
    return [`${words}${last.get(name) ? `, ${sd.times(last.get(name))} in your last race` : measured ? `, ${sd.times(measured)}` : ""}`, name];
  });
};

/** What the list of drafters holds, and those of the second and the third lane; `chosen` are their values. */
export const offer = (all, ...chosen) => {
  const { front } = page.drafters;
  const drafters = offered(page.drafters);
  const own = page.known?.starting[page.preset]?.drafter;
  const few = [...new Set([own, ...front.filter((name) => !(name in missing()))])].slice(0, FEW);
  const lanes = [["No lane", ""], ...drafters.filter(([, name]) => name !== "none")];
  const listed = drafters.filter(([, name]) => all || few.includes(name) || name === chosen[0]);
  return [listed, lanes, lanes].map((choices, list) => {
    const refused = chosen[list] in missing() && before[list] !== undefined && before[list] !== chosen[list];
    if (refused) sd.problem(`${chosen[list]} cannot be used here: ${missing()[chosen[list]]}.`);
    else if (before[list] !== chosen[list]) {
      if (before[list] !== undefined) sd.problem("");
      before[list] = chosen[list];
    }
    return { choices, ...(refused && { value: before[list] }), __type__: "update" };
  });
};

// --- links: they fill the form and never run anything

const LONGEST_NAMED = 60;

/** The preset that was chosen, null if it is the one that the form had. */
export const chose = (preset) => {
  if (preset === page.preset) return null;
  page.preset = preset;
  if (page.status) page.showStatus(page.status);
  return preset;
};

/** The preset to load after a choice, null if that was asked for already. */
export const wanted = (preset) => {
  if (preset === page.loads) return null;
  page.loads = preset;
  return preset;
};

const NAMED = "specdemo-models";
const MOST_NAMED = 8;

/** The models that were named in this browser, which the server tells to nobody else. */
export const namedModels = () => JSON.parse(sd.kept(NAMED) ?? "[]");
export const nameModel = (preset) => sd.keep(NAMED, JSON.stringify([...new Set([...namedModels(), preset])].slice(-MOST_NAMED)));

/** What the form holds, and where a link says something that can be used, that; and what cannot be used. */
const filledFrom = (query, { fields, choices, starting }, values) => {
  const ignored = [];
  const begun = new Map(Object.entries(starting[query.get("preset")] ?? {}));
  const named = fieldsOf(query);
  const filled = fields.map((name, place) => {
    const usual = begun.has(name) ? begun.get(name) : values[place];
    const text = named.get(name) ?? null;
    if (text === null) return usual;
    if (typeof usual === "boolean") return text === "true";
    const given = typeof usual === "number" ? (text.trim() ? Number(text) : NaN) : text;
    if (given === text ? !choices[name] || choices[name].includes(text) : Number.isFinite(given)) return given;
    ignored.push(`${name}=${text.length > LONGEST_NAMED ? `${text.slice(0, LONGEST_NAMED)}…` : text}`);
    return usual;
  });
  chose((page.loads = filled[fields.indexOf("preset")]));
  return [filled, ignored];
};

/** The page was opened: what the form begins with, see `filledFrom`. */
export const opened = (known, values) => {
  const { fields, notes } = known;
  document.body.classList.add("sd-open");
  page.race?.settle();
  Object.assign(page, { fields, known });
  restFrames();
  const query = new URLSearchParams(window.location.search);
  const [filled, ignored] = filledFrom(query, known, values);
  if (ignored.length) page.race?.words("Part of the link cannot be used and was left out.", ignored.join(", "));
  else if (fields.some((name) => query.has(name))) page.race?.words("The form was filled in from a link.", "Press Run to start.");
  else if (notes.length) page.race?.words("Some files could not be read.", notes.join(" "));
  else if (!openRace() && page.race?.is("idle")) page.race.open(page.race.recording);
  return filled;
};

const FRAMES = 60; // in which a tab opens

/** Open the tab of the form with the race, ready to press Run. */
export const showRace = async () => {
  sd.openTab("Race");
  document.querySelector("#stage").toggleAttribute("data-recordings", false);
  window.scrollTo(0, 0); // Check may have been scrolled; to Run only as far as needed
  const run = document.querySelector("#run");
  for (let frames = 0; document.activeElement !== run && frames < FRAMES; frames++) {
    await new Promise(requestAnimationFrame);
    run.focus();
  }
};

/** The form as it was for an earlier race, see `Share.again`. */
export const filledAgain = (values) => filledFrom(new URLSearchParams(page.share.query), page.known, values)[0];
