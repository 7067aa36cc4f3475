"use strict";
// Reloads the page of a run when the run has written something new; the browser keeps the place on the page.
const POLL_MS = 2000;
const lost = document.getElementById("lost");

async function follow() {
  try {
    const answer = await fetch("version");
    if (!answer.ok) throw new Error(answer.statusText);
    if (await answer.text() !== document.body.dataset.version) return location.reload();
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, POLL_MS);
}
setTimeout(follow, POLL_MS);
