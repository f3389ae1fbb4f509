"""The only place that knows the names of model and optimizer libraries."""
