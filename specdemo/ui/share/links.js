// Links. They fill in the form or open a race, and never run anything.
import { page } from "../assets/page.js";
import { posted } from "../replay/replay.js";
import { packed, unpacked } from "./packing.js";

const LONGEST_QUERY = 8000; // characters that servers and those before them take
const LONGEST_LINK = 10_000; // that can be passed on; a race of 128 tokens takes 7,000 to 9,500
const SHORTEST_EVENT = 35; // characters of a link that an event of a race takes at least
const RACE = "#race="; // a fragment: no server hears of it
const LARGEST = 2_000_000; // characters of an unpacked trace; those of links are far smaller
const DIGITS = 3; // as the page shows them
const UNREADABLE = "The race in this link cannot be read: the link is damaged or was cut off.";

const here = () => `${window.location.origin}${window.location.pathname}`;

/** Returns what is to be said of it. */
const copied = async (link) => {
  if (link.length > LONGEST_LINK) return "Too long for a link";
  try {
    await navigator.clipboard.writeText(link);
    return "Copied";
  } catch {
    window.prompt("Copy this link:", link);
    return "";
  }
};

// A link names settings. Where the form has a box instead, `auto` and `match`, the two differ.

/** The query by which a link fills in the form; "" if it is too long. */
export const queryOf = (values) => {
  const query = new URLSearchParams();
  page.fields.forEach((name, place) => query.set(name, values[place] ?? ""));
  if (query.get("auto") === "true") query.set("k", "auto");
  query.delete("auto");
  query.set("rule", query.get("match") === "false" ? "rejection" : "match");
  query.delete("match");
  return String(query).length > LONGEST_QUERY ? "" : String(query);
};

/** The texts of the form's fields that a link names. */
export const fieldsOf = (query) => {
  const fields = new Map(query);
  const k = fields.get("k");
  if (k === "auto") fields.delete("k");
  if (k === "auto" || (k && Number.isFinite(Number(k)))) fields.set("auto", String(k === "auto"));
  if (fields.has("rule")) fields.set("match", String(fields.get("rule") !== "rejection"));
  return fields;
};

export const copyLink = async (values) => {
  const query = queryOf(values);
  page.share.flash("link", query ? await copied(`${here()}?${query}`) : "Too long for a link");
};

/** Whether a race of so many events can be short enough for a link, and this browser can pack it. */
export const mayFit = (events) => events * SHORTEST_EVENT < LONGEST_LINK && "CompressionStream" in window;

/** What a link needs of a line of a trace: the first one, with the settings, as it is; of an event not what else was
 *  possible, and no more digits than are shown. */
const short = (line, at) => {
  const brief = (name, value) => {
    if (name === "probabilities") return undefined;
    return typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(DIGITS)) : value;
  };
  return at === 0 ? line : JSON.stringify(JSON.parse(line), brief);
};

/** Copy a link that holds the race itself. Returns what is to be said of it. */
export const copyRace = async (trace) => copied(here() + RACE + (await packed(trace.trim().split("\n").map(short).join("\n"))));

/** Open the race that the address holds, if it does. */
export const openRace = () => {
  const { hash } = window.location;
  if (!hash.startsWith(RACE)) return false;
  const unreadable = () => JSON.stringify({ error: UNREADABLE });
  const opening = async () => {
    let trace;
    try {
      trace = await unpacked(hash.slice(RACE.length), LARGEST);
    } catch {
      return unreadable();
    }
    return JSON.stringify({ ...JSON.parse(await posted(trace)), kind: "link" });
  };
  page.openReplay(opening());
  return true;
};
