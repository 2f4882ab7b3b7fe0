"""Command-line entry point: ``python -m paceline`` runs ``paceline``."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
