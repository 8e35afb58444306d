// The form: its examples, and links that fill it in.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";

// --- the examples

const SHOWN = 3; // of a kind, until one asks for more

export const mountExamples = (element, props, watch, trigger) => {
  const [categories, prompts] = [["sd-categories", "Kinds of examples"], ["sd-prompts", "Examples"]].map(([name, label]) =>
    Object.assign(sd.make("div", name), { role: "group", ariaLabel: label }),
  );
  const open = (category) => {
    for (const button of categories.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.textContent === category));
    const pick = (prompt) => {
      props.value = prompt;
      trigger("pick");
    };
    const chips = props.prompts[category].map((prompt) => Object.assign(sd.button("sd-chip", prompt, () => pick(prompt)), { title: prompt }));
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

const FLASH_MS = 1500;
const LONGEST_LINK = 8000; // what servers and those before them take
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

/** The page was opened: what the form begins with, and where the address says something that can be used, that. */
export const opened = ({ fields, choices, starting, notes }, values) => {
  document.body.classList.add("sd-open");
  page.race?.settle();
  page.fields = fields;
  window.restFrames?.();
  const query = new URLSearchParams(window.location.search);
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
  if (ignored.length) page.race?.words("Part of the link cannot be used and was left out.", ignored.join(", "));
  else if (fields.some((name) => query.has(name))) page.race?.words("The form was filled in from a link.", "Press Run to start.");
  else if (notes.length) page.race?.words("Some files could not be read.", notes.join(" "));
  else if (page.race?.is("idle")) page.race.open(page.race.recording);
  chose((page.asked = filled[fields.indexOf("preset")]));
  return filled;
};

export const copyLink = async (values) => {
  const query = new URLSearchParams();
  page.fields.forEach((name, place) => query.set(name, values[place] ?? ""));
  if (query.get("auto") === "true") query.set("k", "auto");
  query.delete("auto");
  query.set("rule", query.get("match") === "false" ? "rejection" : "match");
  query.delete("match");
  const link = `${window.location.origin}${window.location.pathname}?${query}`;
  if (link.length > LONGEST_LINK) return flash("Too long for a link");
  try {
    await navigator.clipboard.writeText(link);
    flash("Copied");
  } catch {
    window.prompt("Copy this link:", link);
  }
};

const flash = (words) => {
  const { link } = page.race.parts;
  link.textContent = words;
  setTimeout(() => (link.textContent = "Copy link"), FLASH_MS);
};
