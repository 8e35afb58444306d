// The dialog in which a page begins to share its races, and stops.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { showDialog } from "../assets/top.js";

const LOOPBACK = /^(localhost|127\..*|\[::1\])$/; // a browser's names for its own machine

export const isLocal = ({ hostname } = window.location) => LOOPBACK.test(hostname);

const request = (path, method, query = {}) => fetch(`${sd.address(path)}?${new URLSearchParams({ session: page.session, ...query })}`, { method });

/** What the page shares is `page.shares`: the token, the link and its picture; null if it shares nothing. */
export const showSharing = () =>
  showDialog("sd-sharing", (dialog) => {
    const parts = sd.parts(dialog);
    const show = (shares, error = "") => {
      page.shares = shares;
      parts.message.textContent = error;
      parts.shared.hidden = parts.stop.hidden = !shares;
      parts.share.hidden = Boolean(shares);
      page.race.parts.watch.textContent = shares ? "Sharing" : "Watch along";
      page.race.parts.watch.toggleAttribute("data-on", Boolean(shares));
      if (!shares) return;
      Object.assign(parts.link, { href: shares.link, textContent: shares.link });
      parts.local.hidden = !isLocal(new URL(shares.link));
      parts.picture.hidden = !parts.local.hidden; // nobody else reaches it
      parts.picture.src = shares.picture;
    };
    const share = async () => {
      const answer = await request("/watches", "POST", { address: window.location.origin + sd.address("/watch/") });
      const { error, ...shares } = await answer.json();
      if (error) show(null, error);
      else show(shares);
    };
    const stop = async () => {
      await request(`/watches/${page.shares.token}`, "DELETE");
      show(null);
    };
    const unreachable = () => show(page.shares, sd.UNREACHABLE);
    parts.share.addEventListener("click", () => share().catch(unreachable));
    parts.stop.addEventListener("click", () => stop().catch(unreachable));
    show(page.shares ?? null);
    if (!page.shares) return;
    // The server ends what is shared when it hears nothing of the page for too long.
    fetch(sd.address(`/watch/${page.shares.token}`), { method: "HEAD" }).then(({ status }) => status === 404 && show(null), unreachable);
  });
