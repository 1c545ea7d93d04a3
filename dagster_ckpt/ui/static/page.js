// Refreshes the content in place, keeps the choice for the session, and asks before an action.
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

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});
