// The page's scripts. What Gradio's events call stands in `window.specdemo`.
import { page } from "./assets/page.js";
import * as top from "./assets/top.js";
import { mountStudy } from "./lab/study.js";
import { openAhead } from "./race/ahead.js";
import * as form from "./race/form.js";
import { Game } from "./race/game.js";
import { mountRace } from "./race/race.js";
import { Stage } from "./race/stage.js";
import { mountReplay } from "./replay/replay.js";
import { copyLink } from "./share/links.js";
import { mountShare } from "./share/share.js";
import { showSharing } from "./watch/share.js";

Object.assign(page, { Game }, top, form, { copyLink, mountRace, mountReplay, mountShare, mountStudy, showSharing });
page.stage = new Stage();
openAhead();
