"""Pictures and the report's page: one table of colours, one set of shapes for pages and files."""
