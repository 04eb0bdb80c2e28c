"use strict";
// What is chosen is lit on both sides: lines of the plan, and what they decide.
const all = (selector) => [...document.querySelectorAll(selector)];
const why = document.getElementById("why");
const decided = all("[data-by]"), lines = all("[data-place]");
const places = (element) => (element.dataset.by || "").split("\n");
const acting = new Set(decided.flatMap(places));
let pinned = null;

for (const line of lines) {
  line.classList.toggle("acts", acting.has(line.dataset.place));
  const parts = line.textContent.split(/(#.*$|"[^"]*"|^\s*\w+(?=.*\{\s*$))/);
  line.replaceChildren(...parts.map((part, i) => {
    const token = document.createElement(i % 2 ? "i" : "span");
    token.className = { "#": "c", '"': "q" }[part[0]] || "k";
    token.textContent = part;
    return token;
  }));
}

function light(chosen) {
  for (const element of all(".on")) element.classList.remove("on");
  if (!chosen) return;
  const lit = chosen.dataset.place
    ? decided.filter((element) => places(element).includes(chosen.dataset.place))
    : lines.filter((line) => reasons(chosen).has(line.dataset.place));
  for (const element of [chosen, ...lit]) element.classList.add("on");
  return lit[0];
}

function reasons(element) { // the lines of a row are those that `planc why` quotes
  const template = element.querySelector("template");
  const quoted = template ? [...template.content.querySelectorAll("a")].map((a) => a.textContent) : [];
  return new Set([...places(element), ...quoted]);
}

function pin(chosen) {
  const template = chosen.querySelector("template");
  for (const element of all(".pin")) element.classList.remove("pin");
  if (template) why.replaceChildren(template.content.cloneNode(true));
  chosen.classList.add("pin");
  pinned = chosen;
  show(light(chosen));
}

function show(line) { // moves the plan alone, never the page
  const plan = line && line.closest("#plan");
  if (plan) plan.scrollTo({ top: line.offsetTop - plan.clientHeight / 3 });
}

function colored(gpu) { // the groups of one rank: those whose key it shares
  const mine = gpu.dataset.keys.split(" ");
  for (const other of all(".gpu")) {
    const group = other.dataset.keys.split(" ").findIndex((key, i) => key === mine[i]);
    other.setAttribute("class", other === gpu ? "gpu me" : group < 0 ? "gpu" : `gpu g${group}`);
  }
  document.getElementById("rank").textContent = gpu.querySelector("title").textContent;
}

document.addEventListener("click", (event) => {
  const gpu = event.target.closest(".gpu");
  if (gpu) return colored(gpu);
  const quoted = event.target.closest("#why a");
  const line = quoted && lines.find((other) => other.dataset.place === quoted.textContent);
  if (line) return line.scrollIntoView({ block: "nearest" });
  const chosen = event.target.closest(".row, .acts, [data-by]");
  if (!chosen) return event.target.closest("#why") || why.replaceChildren();
  if (chosen.matches("summary") && chosen !== pinned) event.preventDefault(); // the second click folds
  pin(chosen);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") why.replaceChildren();
  if (event.key === "Enter" && event.target.matches("div.row")) pin(event.target);
});
document.addEventListener("mouseover", (event) => {
  const gpu = event.target.closest(".gpu");
  if (gpu) colored(gpu);
  light(event.target.closest(".row, .acts, [data-by]") || pinned);
});
