// One tooltip for everything: tokens, the legend and the figures; by pointer, touch and keyboard.
import { KINDS, make, quoted, share } from "../assets/page.js";
import { likeliest } from "./tree.js";

const ID = "sd-tooltip";
const MOST_BRANCHES = 8;
const GAP = 8; // px between a tooltip and what it is about, or the edge of the window

/** Under the match rule, and in a tree, a guess passes if it is `own`, which the target wrote at its place. */
const matched = ({ text, code }, own) =>
  ({
    u: ["Target's own draw", "not used", ""],
    a: ["Target's own draw", quoted(text), "the same token: accepted"],
  })[code] ?? ["Target's own draw", quoted(own.text), `p ${share(own.p)}, another token: rejected`];

/** Rows of [name, value, remark] for a token. */
const tokenFacts = ({ token, event: { index, k, tree }, rule, own, tried }) => {
  const { code, p, q, draw, place } = token;
  const rows = [];
  if (code === "r" && tried.length === 1) rows.push(["In place of", quoted(tried[0].text), "which was drafted"]);
  if (index >= 0) rows.push(["Round", String(index + 1), place ? `guess ${place} of ${k}` : ""]);
  rows.push(["Target's probability", share(p), "p"]);
  if (!place) return rows;
  rows.push(["Drafter's probability", share(q), "q"]);
  if (rule === "match" || tree) return [...rows, matched(token, own)];
  const chance = p === null || q === null ? null : Math.min(1, p / q);
  rows.push(["Chance of acceptance", share(chance), "min(1, p/q)"]);
  if (code === "u") return [...rows, ["Draw", "not used", ""]];
  const words = code === "a" ? ["below the chance: ", "accepted"] : ["not below the chance: ", "rejected"];
  return [...rows, ["Draw", share(draw), chance === null || draw === null ? words[1] : words.join("")]];
};

const fillToken = (tip, about) => {
  const { token: { text, code }, event: { index } } = about;
  const [, name, words] = KINDS.find(([kind]) => kind === code);
  const first = index < 0 ? "The target's first token: reading the prompt gives it." : words;
  const rows = tokenFacts(about).flatMap(([label, value, remark]) => [
    make("dt", "", label),
    make("dd", "", value, ...(remark ? [make("small", "", remark)] : [])),
  ]);
  const head = make("p", "sd-tip-head", make("span", `tok ${code}`, name), make("code", "", quoted(text)));
  tip.replaceChildren(head, make("p", "", first), make("dl", "", ...rows), ...branches(about));
};

/** The branches of a tree that were tried where a token stands, each with what was drafted after it. */
const branches = ({ tried, event: { tokens, tree } }) => {
  if (!tree || tried.length < 2) return [];
  const items = tried.slice(0, MOST_BRANCHES).map((token) => {
    const branch = token.code === "a" ? [token] : [token, ...likeliest(tokens, token.place)];
    return make("li", "", ...branch.map(({ text, code }) => make("span", `tok ${code}`, text)));
  });
  const more = tried.length - MOST_BRANCHES;
  if (more > 0) items.push(make("li", "", `and ${more} more`));
  return [make("p", "sd-tip-tried", "The draft branches here:"), make("ul", "sd-tree", ...items)];
};

const fillWhy = (tip, [title, words]) => tip.replaceChildren(make("p", "sd-tip-head", title), make("p", "", words));

/** From where to where no tooltip lies, so that one can go on reading: of a token, all lines of its round. */
const kept = (target, pane) => {
  const parts = pane ? [target, ...(target.closest(".sd-rd")?.querySelectorAll(".tok") ?? [])] : [target];
  const boxes = parts.flatMap((part) => [...part.getClientRects()]);
  const [top, bottom] = [Math.min(...boxes.map((box) => box.top)), Math.max(...boxes.map((box) => box.bottom))];
  const seen = pane?.getBoundingClientRect() ?? { top, bottom };
  return { top: Math.max(top, seen.top), bottom: Math.min(bottom, seen.bottom) };
};

/** Above or below it: where there is room, and of a token where less text is covered. */
const put = (tip, target) => {
  const pane = target.closest(".sd-pane");
  const { top, bottom } = kept(target, pane);
  tip.style.maxHeight = "none";
  const { width, height } = tip.getBoundingClientRect();
  const [above, below] = [top - 2 * GAP, window.innerHeight - bottom - 2 * GAP]; // px of room
  const text = pane?.getBoundingClientRect();
  const liked = text && top - text.top < text.bottom - bottom ? above : below;
  const room = liked >= height ? liked : Math.max(above, below);
  tip.style.maxHeight = `${room}px`;
  const left = Math.max(GAP, Math.min(target.getClientRects()[0].left, window.innerWidth - width - GAP));
  tip.style.transform = `translate(${left}px, ${room === below ? bottom + GAP : top - GAP - Math.min(height, room)}px)`;
};

export const tooltips = (root) => {
  const tip = document.getElementById(ID) || make("div", "sd-tip");
  tip.id = ID;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  let shown = null;

  const hide = () => {
    if (!shown) return;
    shown.removeAttribute("aria-describedby");
    shown.classList.remove("on");
    shown = null;
    tip.classList.remove("open");
  };
  const show = (target) => {
    if (target === shown) return;
    hide();
    shown = target;
    if (target.sdToken) fillToken(tip, target.sdToken);
    else fillWhy(tip, target.sdWhy);
    target.setAttribute("aria-describedby", ID);
    target.classList.add("on");
    tip.classList.add("open");
    put(tip, target);
  };
  const about = (node) => {
    for (let at = node; at && at !== root; at = at.parentElement) {
      if (at.sdWhy || at.sdToken?.token.code) return at;
    }
    return null;
  };
  const follow = (event) => {
    const target = about(event.target);
    if (target) show(target);
    else hide();
  };
  root.addEventListener("pointerover", follow);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("click", follow);
  root.addEventListener("focusin", follow);
  root.addEventListener("focusout", hide);
  const moved = () => {
    if (shown && shown === document.activeElement) put(tip, shown); // the arrow keys scroll to the token they reach
    else hide();
  };
  document.addEventListener("scroll", moved, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const pane = event.target.closest(".sd-pane");
    if (!step || !pane) return;
    const tokens = [...pane.querySelectorAll(".tok")].filter((token) => token.checkVisibility({ visibilityProperty: true }));
    const at = tokens.indexOf(document.activeElement);
    const next = tokens[at < 0 ? (step > 0 ? 0 : tokens.length - 1) : at + step];
    if (!next) return;
    event.preventDefault();
    next.tabIndex = -1;
    next.focus();
  });
};
