// Refreshes the content in place, keeps the choice for the session, shows values of charts, and asks before an action.
"use strict";
const box = document.getElementById("refresh");
box.checked = sessionStorage.getItem("refresh") !== "off";
box.addEventListener("change", () => sessionStorage.setItem("refresh", box.checked ? "on" : "off"));

// A form with input that was not sent yet stays as it is.
const isEdited = (field) => {
  if (field.type === "checkbox") return field.checked !== field.defaultChecked;
  if (field.options) return [...field.options].some((each) => each.selected !== each.defaultSelected);
  return field.value !== field.defaultValue;
};

async function refresh() {
  const busy = document.hidden || document.activeElement?.closest("form") || document.getSelection()?.toString()
    || [...document.querySelectorAll("main input, main select")].some(isEdited);
  if (!box.checked || busy) return;
  const open = new Set([...document.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
  if (!fresh) return;
  for (const each of fresh.querySelectorAll("details")) each.open = open.has(each.querySelector("summary").textContent);
  const main = document.querySelector("main");
  const focused = [...main.querySelectorAll("a, button")].indexOf(document.activeElement);
  main.replaceChildren(...fresh.childNodes);
  if (focused >= 0) main.querySelectorAll("a, button")[focused]?.focus();
}
setInterval(() => refresh().catch(() => {}), 5000);

// The value at the pointer, in the place of the newest one.
function atPointer(event) {
  const svg = event.target.closest?.(".chart svg");
  for (const each of document.querySelectorAll(".dots .near")) each.classList.remove("near");
  for (const each of document.querySelectorAll(".chart output")) each.textContent = "";
  const matrix = svg?.getScreenCTM();
  const dots = svg?.querySelectorAll(".dots circle") ?? [];
  if (!matrix || !dots.length) return;
  const x = (event.clientX - matrix.e) / matrix.a;
  const far = (dot) => Math.abs(dot.cx.baseVal.value - x);
  const near = [...dots].reduce((best, each) => (far(each) < far(best) ? each : best));
  near.classList.add("near");
  svg.closest(".chart").querySelector("output").textContent = near.textContent;
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, atPointer);

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});
