"use strict";
// The page works by its links; this adds the search form, images that are requested again, and the note of the decoder.
const root = document.body.dataset.root;

const form = document.getElementById("search");
if (form) {
  const search = () => {
    const wanted = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      if (value && !(name === "order" && value === "up")) wanted.set(name, value);
    }
    location.assign(`${root}/?${wanted}`);
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); search(); });
  form.addEventListener("change", (event) => { if (event.target.tagName === "SELECT") search(); });
  addEventListener("pageshow", (event) => { if (event.persisted) form.reset(); });  // the form says what is shown
}

const MOST_TRIES = 4;
for (const image of document.querySelectorAll(".frame img")) {
  let tries = 0;
  const again = () => {
    tries += 1;
    if (tries >= MOST_TRIES) return;
    const address = image.getAttribute("src");
    setTimeout(() => { image.src = address; }, 500 * 2 ** tries);  // the server refuses images while too many wait
  };
  image.addEventListener("error", again);
  if (image.complete && !image.naturalWidth && image.loading !== "lazy") again();
}

const note = document.getElementById("note");
async function watchDecoder() {
  const state = await (await fetch(`${root}/status`)).json();
  if (!state.is_ready) {
    setTimeout(watchDecoder, 1000);
  } else if (state.note) {
    note.textContent = `Images are the first three channels of their latents: no decoder. ${state.note}`;
  } else {
    note.hidden = true;
  }
}
if (note && note.dataset.ready === "no") watchDecoder();
