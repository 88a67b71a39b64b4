"""One adapter per backend: they alone know autoreset, episode accounting and preprocessing."""
