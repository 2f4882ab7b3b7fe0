"""Why a run ended, in words."""
