// Lets one variant's attention maps be chosen.
addEventListener("DOMContentLoaded", () => {
  const chosen = document.querySelector("#maps > p select");
  chosen?.addEventListener("change", () => {
    document.querySelectorAll("#maps .one").forEach((one, index) => one.classList.toggle("shown", index === Number(chosen.value)));
  });
});
