// The demo: the recorded race that the page opens with, and others in the player, from what stands in the file.
import { page } from "../assets/page.js";
import { explained } from "../race/opening.js";
import { Race } from "../race/race.js";
import { still } from "../race/show.js";
import { mountReplay, player } from "../replay/replay.js";
import { inFile } from "./in_file.js";

const [stage, note, why] = ["stage", "note", "why"].map((id) => document.getElementById(id));
const buttons = [...document.querySelectorAll("[data-recording]")];
const race = (page.race = new Race(document.getElementById("race"), () => {}, null));
mountReplay(document.getElementById("replay"), { recordings: [] });
player().speed("slow");

// There is one picture of why one pass is enough, of the race that is shown.
const { onePass } = race.charts;
why.append(Object.assign(race.root.querySelector(".sd-why-pass"), { open: true }));

let chosen = null;

/** Show what a button stands for; `at` is when the round ends that is to be stepped through. */
const choose = async (button, at = null) => {
  const { recording, as, words } = button.dataset;
  for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
  note.textContent = words;
  race.skip();
  stage.toggleAttribute("data-recordings", as !== "opening");
  const first = !chosen;
  chosen = button;
  const text = await inFile(recording);
  if (chosen !== button) return;
  if (as === "opening") await race.explain(Promise.resolve(text), !first);
  else await player().take(text);
  onePass.start(as === "opening" ? race.opening.ending : player().data.end);
  if (as === "opening") return;
  const { rounds } = player();
  note.scrollIntoView(); // or the lanes would not fit below it
  if (as === "steps") player().openRound(at ?? rounds[explained(rounds)[0]].at);
  else if (!still()) player().play();
};

for (const button of buttons) {
  button.addEventListener("click", ({ detail }) => {
    if (detail) button.blur(); // Space is for playing
    choose(button);
  });
}
race.openRound = (at) => choose(buttons.find(({ dataset }) => dataset.as === "steps"), at);
race.howOn = "Press Esc to skip it, or Space to pause it.";
choose(buttons[0]);
