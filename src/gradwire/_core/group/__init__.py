"""The group: its members (`membership`), and how they find each other (`rendezvous`)."""
