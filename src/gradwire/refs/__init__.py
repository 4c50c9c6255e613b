"""Remote references: values that stay where they are and are held on to from elsewhere."""
