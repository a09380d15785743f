"""What is run: a TOML file, its schema, and the presets that come with the package."""
