// The page of a saved race: the player of recordings with what stands in the file.
import { isDark, toggleDark } from "../assets/top.js";
import { mountReplay, player } from "../replay/replay.js";
import { unpacked } from "./packing.js";

document.body.classList.toggle("dark", isDark());
document.querySelector(".sd-dark").addEventListener("click", toggleDark);
mountReplay(document.getElementById("replay"), { recordings: [] });
player().take(unpacked(document.getElementById("race").textContent));
