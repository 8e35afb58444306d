// The page of a saved race: the player of recordings with what stands in the file.
import { mountReplay, player } from "../replay/replay.js";
import { inFile } from "./in_file.js";

mountReplay(document.getElementById("replay"), { recordings: [] });
player().take(inFile("race"));
