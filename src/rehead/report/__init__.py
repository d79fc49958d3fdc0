"""Output for people: progress, tables, charts and pages."""
