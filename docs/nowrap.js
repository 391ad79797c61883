// Keeps a flag or a name on one line: browsers break "--use-dpp" after its dashes.
document$.subscribe(() => {
  for (const code of document.querySelectorAll("article :not(pre) > code")) {
    const most = /\s/.test(code.textContent) ? 20 : 32;
    if (code.textContent.length <= most) code.style.whiteSpace = "nowrap";
  }
});
