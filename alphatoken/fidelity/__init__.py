"""Where oracle and estimators meet: metrics and certificates on the user's own model."""
