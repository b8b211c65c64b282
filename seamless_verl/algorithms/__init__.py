"""Methods beside verl's own, one a file: corrections for tokens of older weights, and advantage estimators."""
