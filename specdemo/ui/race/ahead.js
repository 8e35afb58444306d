// Begins the opening before Gradio has made the page, which takes a second or more: until the page is open, the arena
// stands in front of it, where the page will have it, below a copy of the line at the top.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { isDark } from "../assets/top.js";
import { Race } from "./race.js";

export const openAhead = () => {
  const { version, components = [] } = window.gradio_config; // it has none for those who still have to log in
  const race = components.find(({ props }) => props.elem_id === "race");
  const isLink = [...new URLSearchParams(window.location.search).keys()].some((name) => !name.startsWith("__")) || window.location.hash; // Gradio's own
  if (!race?.props.props.recording || isLink) return;
  const top = Object.assign(sd.clone("sd-top").firstElementChild, { inert: true });
  const arena = sd.make("div");
  const gradios = `gradio-container gradio-container-${version.replaceAll(".", "-")}`; // which sets its own parts back
  document.body.append(sd.make("div", isDark() ? "sd-ahead dark" : "sd-ahead", sd.make("div", gradios, top, arena)));
  page.race = new Race(arena, () => {}, null);
  page.race.open(race.props.props.recording);
};
