"""What predictions are worth: measures of them, exact or from counts that may travel, and how sure they are."""
