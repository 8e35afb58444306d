// The line at the top of the page, what the model is doing, dark or light, help, and the keys.
import * as sd from "./page.js";
import { page } from "./page.js";

export const press = (id) => document.querySelector(`#${id}`)?.click();

// --- the line at the top

export const mountTop = (element, props, watch, trigger) => {
  document.body.classList.toggle("dark", isDark());
  const top = sd.clone("sd-top").firstElementChild;
  element.replaceChildren(top);
  page.drafters = props;
  const { dark, help, retry, progress, model, facts } = sd.parts(top);
  dark.addEventListener("click", toggleDark);
  help.addEventListener("click", showHelp);
  retry.addEventListener("click", () => trigger("retry"));
  page.showStatus = (status) => {
    page.status = status;
    const { stage, words, notes, fraction } = shown(status, props.titles);
    top.dataset.stage = stage;
    sd.put(model, stage === "ready" || stage === "other" ? words : sentence(words));
    sd.put(facts, stage === "ready" ? "" : notes);
    top.querySelector(".sd-status").title = notes;
    retry.hidden = stage !== "failed";
    progress.hidden = stage !== "loading";
    if (fraction === null) progress.removeAttribute("value");
    else progress.value = fraction;
    const known = JSON.stringify([page.preset, missing()]);
    if (known === offered) return; // so that an open list stays open
    offered = known;
    page.offerDrafters();
  };
  page.offerDrafters = () => trigger("able");
  let offered = null;
  watch("value", () => follow(JSON.parse(props.value || "{}").session));
  document.addEventListener("visibilitychange", () => follow());
  follow();
};

// --- what the model is doing: server-sent, see stream.py

let source = null;

/** Listen from now on. Not while the page is out of sight: a browser has six connections to a server, for all pages. But a
 *  page that shares its races goes on, or the server would take it for closed. */
const follow = (as = page.session) => {
  page.session = as;
  source?.close();
  if (document.hidden && !page.shares) return;
  source = new EventSource(sd.address(`/status?session=${encodeURIComponent(page.session)}`));
  source.onerror = ({ target }) => {
    if (target.readyState === EventSource.CLOSED) setTimeout(() => target === source && follow(), page.LOST_MS); // refused
  };
  source.onmessage = ({ data }) => page.showStatus(JSON.parse(data));
};

export const placeInWords = ({ place, of, seconds }) => {
  const minutes = Math.round(seconds / 60);
  const time = seconds === null ? "" : seconds < 10 ? ", a few seconds" : seconds < 90 ? `, about ${seconds} s` : `, about ${minutes} min`;
  return `Waiting: number ${place} of ${of}${time}.`;
};

/** The preset that is in memory. */
const loaded = ({ stage, preset, loaded: kept }) => kept ?? (stage === "ready" ? preset : "");

/** Why the chosen preset cannot use some drafters, as far as that is known by now. */
export const missing = () => (page.status && loaded(page.status) === page.preset && page.status.unavailable) || {};

/** A status as this page shows it: what is done for others is not its own progress, nor its own failure. */
const shown = (status, titles) => {
  const { stage, preset, words, facts, fraction } = status;
  const title = (name) => titles[name] ?? name; // a model that was named by a visitor is called by its name
  const notes = (facts || []).join(" · ");
  if (stage === "idle" || !page.preset || preset === page.preset) return { stage, words, notes, fraction };
  const other = { stage: "other", fraction: null };
  if (stage === "loading") return { ...other, words: title(preset), notes: `is being loaded for another visitor: ${words}` };
  const has = loaded(status);
  if (!has) return { ...other, stage: "idle", words: "No model is loaded yet", notes: "" };
  if (has === page.preset) return { ...other, stage: "ready", words: title(has), notes };
  return { ...other, words: title(has), notes: `${title(page.preset)} is loaded when you press Run` };
};

export const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

// --- dark or light: as the address says, else as it was chosen here, else as the system is

const SHADE = "specdemo-shade";

export const toggleDark = () => sd.keep(SHADE, document.body.classList.toggle("dark") ? "dark" : "light");

export const isDark = () => {
  const shade = new URLSearchParams(window.location.search).get("__theme") ?? sd.kept(SHADE);
  return shade === "dark" || (shade !== "light" && window.matchMedia("(prefers-color-scheme: dark)").matches);
};

// --- help and keys

/** Opens the dialog of a template, which `fill` completes. It is there until it is closed. */
export const showDialog = (id, fill) => {
  if (document.querySelector("dialog[open]")) return;
  const dialog = sd.clone(id).firstElementChild;
  fill(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  document.querySelector(".gradio-container").append(dialog);
  openDialog(dialog);
};

export const openDialog = (dialog) => {
  if (dialog.open) return;
  dialog.showModal();
  dialog.querySelector("h2").focus(); // where reading begins; the browser chooses the button
  dialog.scrollTop = 0;
};

export const showHelp = () =>
  showDialog("sd-help", (dialog) => {
    const list = dialog.querySelector(".sd-kinds");
    for (const [code, name, words] of sd.KINDS) list.append(sd.make("dt", "", sd.make("span", `tok ${code}`, name)), sd.make("dd", "", words));
  });

const KEYS = { d: toggleDark, "?": showHelp };
const RACE_KEYS = { f: () => page.stage?.toggle(), g: () => page.race.game?.begin(), r: () => press("run"), s: () => press("stop"), h: () => page.race.parts.hide.click(), n: () => page.race.show.next() };
const raceShows = () => Boolean(page.race?.root.offsetParent); // and not another tab
document.addEventListener("keydown", (event) => {
  const inDialog = event.target.closest?.("dialog[open]");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat && raceShows() && !inDialog) {
    event.preventDefault();
    return press("run");
  }
  const typing = event.target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]");
  const types = typing && event.key.length === 1; // a letter, which is no key of the stage there
  const own = !inDialog && !event.ctrlKey && !event.metaKey && !event.altKey; // it may be a key of the page
  if (own && !typing && raceShows() && !event.target.closest?.("button, a") && page.race.game?.key(event.key)) return;
  if (own && !types && page.stage?.on && page.stage.key(event.key.toLowerCase())) return event.preventDefault();
  if (event.key === "Escape" && page.race?.state === "opening") return page.race.skip();
  if (event.key === " " && page.race?.state === "opening" && !event.target.closest?.("button, input, select, textarea, dialog[open]")) {
    event.preventDefault();
    return page.race.opening.hold();
  }
  if (!own || typing || !page.fields || event.repeat) return;
  const key = event.key.toLowerCase();
  const act = KEYS[key] || (raceShows() && RACE_KEYS[key]);
  if (!act) return;
  event.preventDefault();
  act();
});
