// Keeps a flag or a name on one line: browsers break "--use-dpp" after its dashes.
document$.subscribe(() => {
  for (const code of document.querySelectorAll("article :not(pre) > code")) {
    if (!/\s/.test(code.textContent) && code.textContent.length < 32) code.style.whiteSpace = "nowrap";
  }
});
