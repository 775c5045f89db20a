"""The actors and what they are made of. Import only leftwards: schemas → bus → parts → actors → runtime, cli."""
