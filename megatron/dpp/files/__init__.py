"""Files that others may write, too: opened safely, locked, replaced whole, and read strictly."""
