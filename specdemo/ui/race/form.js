// The form: its examples, and links that fill it in.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { openRace } from "../share/links.js";

// --- the examples

const SHOWN = 3; // of a kind, until one asks for more

export const mountExamples = (element, props, watch, trigger) => {
  const [categories, prompts] = [["sd-categories", "Kinds of examples"], ["sd-prompts", "Examples"]].map(([name, label]) =>
    Object.assign(sd.make("div", name), { role: "group", ariaLabel: label }),
  );
  const pick = (prompt) => {
    props.value = prompt;
    trigger("pick");
  };
  let shown = []; // of the kind that is open
  /** Put an example of the kind that is open into the form, by its place; it resolves when it is there. */
  page.pick = async (at) => {
    const prompt = shown[at % shown.length];
    pick(prompt);
    const field = document.querySelector("#prompt textarea");
    for (let frames = 0; field.value !== prompt && frames < 60; frames++) await new Promise(requestAnimationFrame);
  };
  const open = (category) => {
    shown = props.prompts[category];
    for (const button of categories.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.textContent === category));
    const chips = shown.map((prompt) => Object.assign(sd.button("sd-chip", prompt, () => pick(prompt)), { title: prompt }));
    const rest = chips.splice(SHOWN);
    const more = sd.button("sd-chip sd-more", `${rest.length} more`, () => {
      more.replaceWith(...rest);
      rest[0].focus();
    });
    prompts.replaceChildren(...chips, ...(rest.length ? [more] : []));
  };
  for (const category of Object.keys(props.prompts)) {
    if (category === props.hard[0]) categories.append(sd.make("span", "sd-hard", "Harder to guess:"));
    categories.append(sd.button("sd-category", category, () => open(category)));
  }
  element.replaceChildren(categories, prompts);
  const first = categories.querySelector("button");
  if (first) open(first.textContent);
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
  if (preset === page.asked) return null;
  page.asked = preset;
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
  const k = query.get("k");
  const begun = new Map(Object.entries(starting[query.get("preset")] ?? {}));
  const filled = fields.map((name, place) => {
    const usual = begun.has(name) ? begun.get(name) : values[place];
    if (name === "auto") return k === "auto" || (usual && !(k && Number.isFinite(Number(k))));
    if (name === "tree") return query.has("tree") ? query.get("tree") === "true" : usual;
    if (name === "match") return query.has("rule") ? query.get("rule") !== "rejection" : usual;
    if (!query.has(name) || (name === "k" && k === "auto")) return usual;
    const text = query.get(name);
    const given = typeof usual === "number" ? (text.trim() ? Number(text) : NaN) : text;
    if (given === text ? !choices[name] || choices[name].includes(text) : Number.isFinite(given)) return given;
    ignored.push(`${name}=${text.length > LONGEST_NAMED ? `${text.slice(0, LONGEST_NAMED)}…` : text}`);
    return usual;
  });
  chose((page.asked = filled[fields.indexOf("preset")]));
  return [filled, ignored];
};

/** The page was opened: what the form begins with, see `filledFrom`. */
export const opened = (known, values) => {
  const { fields, notes } = known;
  document.body.classList.add("sd-open");
  page.race?.settle();
  Object.assign(page, { fields, known });
  window.restFrames?.();
  const query = new URLSearchParams(window.location.search);
  const [filled, ignored] = filledFrom(query, known, values);
  if (ignored.length) page.race?.words("Part of the link cannot be used and was left out.", ignored.join(", "));
  else if (fields.some((name) => query.has(name))) page.race?.words("The form was filled in from a link.", "Press Run to start.");
  else if (notes.length) page.race?.words("Some files could not be read.", notes.join(" "));
  else if (!openRace() && page.race?.is("idle")) page.race.open(page.race.recording);
  return filled;
};

const FRAMES = 60; // in which a tab opens

/** Open the tab of the form, ready to press Run. */
export const showRace = async () => {
  sd.openTab("Race");
  window.scrollTo(0, 0); // Check may have been scrolled; to Run only as far as needed
  const run = document.querySelector("#run");
  for (let frames = 0; document.activeElement !== run && frames < FRAMES; frames++) {
    await new Promise(requestAnimationFrame);
    run.focus();
  }
};

/** The form as it was for an earlier race, see `Share.again`. */
export const filledAgain = (values) => filledFrom(new URLSearchParams(page.share.query), page.known, values)[0];
