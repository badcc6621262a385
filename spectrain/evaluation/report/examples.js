// Steps through the examples of the report: one pass of the target after the other. Without it all passes are shown.
document.querySelectorAll(".example").forEach((example) => {
  const passes = [...example.querySelectorAll(".pass")];
  const count = example.querySelectorAll.bind(example);
  if (passes.length < 2) return;
  let shown = passes.length; // all of them
  const bar = document.createElement("div");
  bar.className = "steps";
  const said = document.createElement("span");
  said.setAttribute("aria-live", "polite");

  function show(number) {
    shown = Math.max(1, Math.min(passes.length, number));
    const all = number > passes.length;
    passes.forEach((pass, index) => {
      pass.classList.toggle("later", !all && index >= shown);
      pass.classList.toggle("now", !all && index === shown - 1);
    });
    const drafts = all ? count("mark").length : passes[shown - 1].querySelectorAll("mark").length;
    const accepted = `${drafts} accepted ${drafts === 1 ? "draft" : "drafts"}`;
    said.textContent = all ? `${passes.length} passes, ${accepted}` : `pass ${shown} of ${passes.length}, ${accepted}`;
    if (all) shown = passes.length + 1;
  }

  [
    ["first", "From the start", () => 1],
    ["back", "Back", () => shown - 1],
    ["next", "Next pass", () => (shown > passes.length ? 1 : shown + 1)],
    ["all", "All", () => passes.length + 1],
  ].forEach(([name, label, wanted]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.name = name;
    button.textContent = label;
    button.addEventListener("click", () => show(wanted()));
    bar.append(button);
  });
  bar.append(said);
  example.querySelector(".answer").before(bar);
  show(passes.length + 1);
});
