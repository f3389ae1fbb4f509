"""The paper's tables at laptop scale, on public rows, and the page that shows both."""
