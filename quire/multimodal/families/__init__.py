"""What is special about the pictures of each family of models, without torch."""
