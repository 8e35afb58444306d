// What the tabs share: the kinds of tokens, the templates, numbers as text, files.
import { html } from "../templates.js"; // which the server makes of page.html and the others, see joined.py

/** What is so on the page, for its parts, for Gradio's events and for tests: the race, the status, the preset, the
 *  session; after how many milliseconds without a connection the server counts as lost; and the studies of the Lab. */
export const page = (window.specdemo = { session: "", LOST_MS: 15_000, lab: {} });

export const UNREACHABLE = "The server cannot be reached. Try again."; // Gradio answers undefined then
export const KINDS = [
  ["a", "accepted", "The drafter guessed it, and the target accepted it."],
  ["r", "corrected", "The target's own token, in the place of a drafted one that it rejected. Papers call it resampled."],
  ["b", "bonus", "Every guess of the round was accepted, so the same pass gave the target's next token for free."],
  ["t", "not drafted", "The target wrote it by itself, in a round in which the drafter guessed nothing."],
  ["x", "rejected", "The drafter guessed it, but the target rejected it, so it was discarded."],
  ["u", "untested", "It came after the rejected token, or after the end, so it was discarded untested."],
];

const skeleton = document.createElement("template");
skeleton.innerHTML = html;
/** A fresh copy of a template. */
export const clone = (id) => skeleton.content.getElementById(id).content.cloneNode(true);
/** Text only ever becomes text nodes. */
export const make = (tag, className = "", ...contents) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...contents);
  return node;
};
/** Open one of the page's tabs. */
export const openTab = (name) => {
  const tabs = [...document.querySelectorAll("#tabs [role=tab]")];
  tabs.find((tab) => tab.textContent.trim() === name).click();
};
export const button = (className, text, act) => {
  const node = Object.assign(make("button", className, text), { type: "button" });
  node.addEventListener("click", act);
  return node;
};
/** The elements of a copied template that have a name there. */
export const parts = (root) => Object.fromEntries([...root.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
/** Text that is there already is left alone: a change is laid out, and read out where that is on. */
export const put = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
export const number = (value, digits) => value?.toFixed(digits) ?? "–";
/** A speed-up, if it is known. */
export const times = (ratio) => (ratio ? `${ratio.toFixed(2)}×` : "–");
/** Behind the speed-up of writing, that of all the time; in words the same as `speeds` in verdict_words.py. */
export const inAll = (ratio) => `writing, ${times(ratio)} in all`;
/** How much is drafted in a round. A server does not say it. */
export const draftSize = ({ k, tree }) => (k === null ? "" : tree && k !== "auto" ? `trees of ${k}` : `${tree ? "trees, " : ""}K ${k}`);
/** Who guesses in a lane of the drafter `you`. */
export const people = ({ tree }) => (tree ? "The room" : "You");
export const percent = (value) => (Number.isFinite(value) ? `${Math.round(value * 100)}%` : "–");
/** A probability; null where it is not known. */
export const share = (value) => (value === null ? "unknown" : value === 0 || value === 1 ? String(value) : value < 0.0005 ? "<0.001" : value.toFixed(3));
export const equals = (name, value) => `${name} = ${share(value)}`.replace("= <", "< ");
/** What is wrong with a request stands beside the form, which watchers do not have. */
export const problem = (sentence) => put(document.querySelector("#problem p") ?? {}, sentence);
export const quoted = JSON.stringify;
export const line = (text) => text.replaceAll("\n", "↵"); // what breaks no line here
export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;
export const millis = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

/** The address of something that the server has besides Gradio's own. */
export const address = (path) => new URL(window.gradio_config.root || "/", window.location.href).pathname.replace(/\/$/, "") + path;

/** What the server answers: what is to be played, or an error, as JSON. */
export const fetched = async (path, options) => {
  const answer = await fetch(address(path), options);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.text();
};

/** What this browser keeps of a visitor's choices; null if it keeps nothing. */
export const kept = (name) => {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
};
export const keep = (name, value) => {
  try {
    localStorage.setItem(name, value);
  } catch {}
};

export const save = (text, name, type) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};
